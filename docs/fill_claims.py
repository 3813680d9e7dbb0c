"""Fills the table of `claims.md` from the runs in `studies/results/`: `python docs/fill_claims.py`."""

import re
from pathlib import Path

from lsgpt.studies import STUDIES, judge, load_study, read_runs
from lsgpt.utilities import table


PAGE = Path(__file__).parent / "claims.md"
RESULTS = Path(__file__).parents[1] / "studies" / "results"


def claims() -> str:
    """A row for each claim of each study."""
    rows = []
    for name in STUDIES:
        study = load_study(name)
        runs = read_runs(study, RESULTS / name)
        report = f"[{study.title}](../studies/results/{name}/report.md)" if runs else f"{study.title}: `{name}`"
        for key, finding in judge(study, runs).items():
            claim = study.claims[key]
            text = f"{claim.text[0].upper()}{claim.text[1:]} ({claim.source})"
            rows.append([text, finding.figure, f"**{finding.verdict}**", report])
    return table(rows, ["claim (who makes it)", "found", "verdict", "study"])


def fill(text: str) -> str:
    """The page's text with a new table."""
    pattern = r"(<!-- table: claims -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda match: f"{match[1]}{claims()}\n{match[2]}", text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
