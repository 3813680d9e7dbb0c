"""Refuses configurations that cannot be served, before vLLM loads the model."""

from vllm.config import VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from lsgpt.modeling_lsgpt.configuration_lsgpt import FULL_WINDOW, GLOBAL, LOCAL, LSGPTConfig
from lsgpt.utilities import SERVED_VALUES, VLLM_ROPE_TYPES, has_sinks, runs_on_vllm


ORIGINAL_POSITIONS = "original_max_position_embeddings"


class LSGPTServingChecks(VerifyAndUpdateConfig):
    """vLLM calls this once, in the process that the user started."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig):
        """Raises `ValueError` if the model cannot be served; changes nothing."""
        config: LSGPTConfig = vllm_config.model_config.hf_config
        ranks = vllm_config.parallel_config.tensor_parallel_size
        groups = config.num_attention_heads // config.num_key_value_heads
        for i, num_heads in enumerate(config.num_heads_by_kind):
            num_global, num_local = (num_heads.get(kind, 0) // groups for kind in (GLOBAL, LOCAL))
            if num_global % ranks or num_local % ranks:
                raise ValueError(
                    "`tensor_parallel_size` must divide the number of global and of local key/value heads in each "
                    f"layer; got {ranks}, and layer {i} has {num_global} global and {num_local} local ones"
                )
        for field, supported in SERVED_VALUES.items():
            if (value := getattr(config, field)) not in supported:
                raise ValueError(
                    f"`{field}` must be {' or '.join(map(repr, supported))} to be served with vLLM; got {value!r}. "
                    "Use Transformers, or serve the model that this one was converted from"
                )
        if has_sinks(config) and config.attention_sinks == FULL_WINDOW:
            raise ValueError(
                "`attention_sinks` must be True or False to be served with vLLM, which shows a sink to every query; "
                f'got "{FULL_WINDOW}". Use Transformers, or let the model learn sinks that every query sees: '
                "`lsgpt train heal --config_overrides '{attention_sinks: true}'`"
            )
        if not runs_on_vllm(config):
            raise ValueError(
                f"`rope_parameters` must be of a `rope_type` among {', '.join(VLLM_ROPE_TYPES)}, in all layers alike, "
                f"to be served with vLLM; got {config.rope_parameters.get('rope_type', config.rope_parameters)!r}"
            )
        length = vllm_config.model_config.max_model_len
        rope = config.rope_parameters or {}
        if rope.get("rope_type") == "yarn" and length > (end := int(rope[ORIGINAL_POSITIONS] * rope["factor"])):
            raise ValueError(
                f"`max_model_len` must be at most {end}, the positions that vLLM computes with these "
                f"`rope_parameters` (`{ORIGINAL_POSITIONS}` times `factor`); got {length}"
            )
        if config.position_embedding_type == "learned" and length > config.max_position_embeddings:
            raise ValueError(
                f"`max_model_len` must be at most {config.max_position_embeddings}, the number of learned positions "
                f"(`max_position_embeddings`); got {length}"
            )
