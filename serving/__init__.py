"""The vLLM plugin: with this package installed, `vllm serve FOLDER` and `LLM(FOLDER)` run LSGPT natively.

vLLM finds `register` through the entry point `vllm.general_plugins`, and calls it in each of its processes.
"""


def register():
    """Registers LSGPT with vLLM. Importing `lsgpt` has already registered its configuration with Transformers."""
    # Imported here because only vLLM calls this function; the model class is imported when a model is loaded.
    from vllm import ModelRegistry  # noqa: PLC0415
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP  # noqa: PLC0415

    from .checks import LSGPTServingChecks  # noqa: PLC0415

    ModelRegistry.register_model("LSGPTForCausalLM", "lsgpt.serving.modeling_vllm:LSGPTForCausalLM")
    MODELS_CONFIG_MAP["LSGPTForCausalLM"] = LSGPTServingChecks


__all__ = ["register"]
