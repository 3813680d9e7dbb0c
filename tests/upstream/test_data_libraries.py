"""What we rely on in Datasets and Evaluate beyond what they promise, one test for each thing."""

import datasets
import evaluate


def test_datasets_fingerprint_and_new_fingerprint():
    first, second = (datasets.Dataset.from_dict({"text": [text]}) for text in "ab")
    assert first._fingerprint != second._fingerprint
    assert first.map(lambda row: row, new_fingerprint="given")._fingerprint == "given"
    assert datasets.fingerprint.Hasher.hash(["a", 1]) == datasets.fingerprint.Hasher.hash(["a", 1])


def test_evaluate_finalize_and_writer():
    class Length(evaluate.Metric):
        finalized = 0

        def _info(self):
            features = datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            )
            return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

        def _finalize(self):
            self.finalized += 1
            assert self.writer is not None
            super()._finalize()

        def _compute(self, predictions, references):
            return {"length": len(predictions)}

    metric = Length(keep_in_memory=True)
    assert metric.writer is None
    assert metric.compute(predictions=[1, 2], references=[1, 2]) == {"length": 2}
    assert metric.writer is None and metric.finalized == 1
