"""The vLLM plugin: with this package installed, `vllm serve FOLDER` and `LLM(FOLDER)` run LSGPT natively.

vLLM finds `register` through the entry point `vllm.general_plugins`, and calls it in each of its processes.
"""


def register():
    """Makes LSGPT known to vLLM. Importing `lsgpt` has made the configuration known to Transformers already."""
    # Only a process of vLLM's calls this; the model itself is imported when one is loaded.
    from vllm import ModelRegistry  # noqa: PLC0415
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP  # noqa: PLC0415

    from .checks import LSGPTServingChecks  # noqa: PLC0415

    ModelRegistry.register_model("LSGPTForCausalLM", "lsgpt.serving.modeling_vllm:LSGPTForCausalLM")
    MODELS_CONFIG_MAP["LSGPTForCausalLM"] = LSGPTServingChecks


__all__ = ["register"]
