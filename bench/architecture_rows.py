"""The architectures of transformers that ``architectures.py`` tries: tiny ones of each kind.

Each is a class of transformers with a configuration that is small in every way but the number of
its layers: four where it can be, so that there is something to cut.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Architecture:
    """One model.

    Attributes:
        name: for the table.
        model: the class, of transformers.
        inputs: names of its inputs, of ``INPUTS``.
        config: fields of its configuration.
    """

    name: str
    model: str
    inputs: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)


_TEXT = ("tokens", "padding")
_TOKENS = ("tokens",)
_SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
_BERT = dict(**_SIZES, intermediate_size=48, max_position_embeddings=64)
_LLAMA = dict(**_BERT, num_key_value_heads=2)
_MOE = dict(**_LLAMA, num_experts_per_tok=2)
_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
_CONV = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
}
_SPEECH = dict(
    **_BERT,
    **_CONV,
    num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=2,
    mask_time_prob=0.0,
)
_SEQ2SEQ = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
_PAIR = (*_TEXT, "translation")

ARCHITECTURES = (
    # encoders of text
    Architecture("BERT", "BertForSequenceClassification", _TEXT, _BERT),
    Architecture("RoBERTa", "RobertaForSequenceClassification", _TEXT, _BERT),
    Architecture("ALBERT", "AlbertForMaskedLM", _TEXT, {**_BERT, "embedding_size": 16}),
    Architecture(
        "ELECTRA", "ElectraForTokenClassification", _TEXT, {**_BERT, "embedding_size": 16}
    ),
    Architecture(
        "DistilBERT",
        "DistilBertForMaskedLM",
        _TEXT,
        {"vocab_size": 99, "dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 48},
    ),
    Architecture("MPNet", "MPNetForMaskedLM", _TEXT, _BERT),
    Architecture(
        "DeBERTa v2",
        "DebertaV2ForMaskedLM",
        _TEXT,
        {
            **_BERT,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
        },
    ),
    Architecture("ConvBERT", "ConvBertForMaskedLM", _TEXT, {**_BERT, "embedding_size": 32}),
    Architecture("FNet", "FNetForMaskedLM", _TOKENS, _BERT),
    Architecture("ModernBERT", "ModernBertForMaskedLM", _TEXT, {**_BERT, "pad_token_id": 0}),
    Architecture(
        "XLNet",
        "XLNetForSequenceClassification",
        _TEXT,
        {"vocab_size": 99, "d_model": 32, "n_layer": 4, "n_head": 4, "d_inner": 48},
    ),
    # decoders
    Architecture(
        "GPT-2",
        "GPT2LMHeadModel",
        _TEXT,
        {"vocab_size": 99, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    ),
    Architecture(
        "GPT-Neo",
        "GPTNeoForCausalLM",
        _TEXT,
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "max_position_embeddings": 64,
            "window_size": 8,
        },
    ),
    Architecture(
        "GPT-J",
        "GPTJForCausalLM",
        _TEXT,
        {
            "vocab_size": 99,
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 64,
            "rotary_dim": 4,
        },
    ),
    Architecture("GPT-NeoX", "GPTNeoXForCausalLM", _TEXT, _BERT),
    Architecture(
        "OPT",
        "OPTForCausalLM",
        _TEXT,
        dict(**_SIZES, ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=32),
    ),
    Architecture(
        "BLOOM",
        "BloomForCausalLM",
        _TEXT,
        {"vocab_size": 99, "hidden_size": 32, "n_layer": 4, "n_head": 4},
    ),
    Architecture("Llama", "LlamaForCausalLM", _TEXT, _LLAMA),
    Architecture("Mistral", "MistralForCausalLM", _TEXT, {**_LLAMA, "sliding_window": 8}),
    Architecture("Qwen2", "Qwen2ForCausalLM", _TEXT, _LLAMA),
    Architecture("Qwen3", "Qwen3ForCausalLM", _TEXT, {**_LLAMA, "head_dim": 8}),
    Architecture(
        "Gemma 2", "Gemma2ForCausalLM", _TEXT, {**_LLAMA, "head_dim": 8, "sliding_window": 8}
    ),
    Architecture(
        "Gemma 3", "Gemma3ForCausalLM", _TEXT, {**_LLAMA, "head_dim": 8, "sliding_window": 8}
    ),
    Architecture("Phi", "PhiForCausalLM", _TEXT, _BERT),
    Architecture("Phi-3", "Phi3ForCausalLM", _TEXT, {**_LLAMA, "pad_token_id": 0}),
    Architecture("Falcon", "FalconForCausalLM", _TEXT, _SIZES),
    Architecture(
        "MPT",
        "MptForCausalLM",
        _TEXT,
        {"vocab_size": 99, "d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 64},
    ),
    Architecture("OLMo 2", "Olmo2ForCausalLM", _TEXT, _LLAMA),
    Architecture("StableLM", "StableLmForCausalLM", _TEXT, _LLAMA),
    Architecture("Cohere", "CohereForCausalLM", _TEXT, {**_LLAMA, "pad_token_id": 0}),
    Architecture("Granite", "GraniteForCausalLM", _TEXT, _LLAMA),
    # mixtures of experts
    Architecture("Mixtral", "MixtralForCausalLM", _TEXT, {**_MOE, "num_local_experts": 4}),
    Architecture(
        "Qwen3 MoE",
        "Qwen3MoeForCausalLM",
        _TEXT,
        {**_MOE, "num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
    ),
    Architecture("OLMoE", "OlmoeForCausalLM", _TEXT, {**_MOE, "num_experts": 4}),
    Architecture(
        "DeepSeek v3",
        "DeepseekV3ForCausalLM",
        _TEXT,
        {
            **_MOE,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
    Architecture(
        "GPT-OSS",
        "GptOssForCausalLM",
        _TEXT,
        {**_MOE, "num_local_experts": 4, "head_dim": 8, "sliding_window": 8},
    ),
    # state space and recurrent
    Architecture(
        "Mamba",
        "MambaForCausalLM",
        _TOKENS,
        {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4},
    ),
    Architecture(
        "Mamba 2",
        "Mamba2ForCausalLM",
        _TOKENS,
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    Architecture(
        "RWKV",
        "RwkvForCausalLM",
        _TOKENS,
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "attention_hidden_size": 32,
            "intermediate_size": 48,
            "context_length": 64,
        },
    ),
    Architecture(
        "RecurrentGemma",
        "RecurrentGemmaForCausalLM",
        _TEXT,
        {
            **_LLAMA,
            "num_key_value_heads": 1,
            "lru_width": 32,
            "attention_window_size": 8,
            "pad_token_id": 0,
        },
    ),
    # encoders with decoders
    Architecture(
        "T5",
        "T5ForConditionalGeneration",
        _PAIR,
        {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4},
    ),
    Architecture("BART", "BartForConditionalGeneration", _PAIR, _SEQ2SEQ),
    Architecture("Pegasus", "PegasusForConditionalGeneration", _PAIR, _SEQ2SEQ),
    Architecture(
        "Marian",
        "MarianMTModel",
        _PAIR,
        {**_SEQ2SEQ, "pad_token_id": 0, "decoder_start_token_id": 0},
    ),
    Architecture("M2M-100", "M2M100ForConditionalGeneration", _PAIR, _SEQ2SEQ),
    # images
    Architecture("ViT", "ViTForImageClassification", ("image",), _VIT),
    Architecture("DeiT", "DeiTForImageClassification", ("image",), _VIT),
    Architecture("DINOv2", "Dinov2ForImageClassification", ("image",), {**_VIT, "mlp_ratio": 2}),
    Architecture("BEiT", "BeitForImageClassification", ("image",), _VIT),
    Architecture(
        "Swin",
        "SwinForImageClassification",
        ("image",),
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
        },
    ),
    Architecture(
        "ConvNeXt",
        "ConvNextForImageClassification",
        ("image",),
        {"hidden_sizes": [16, 16, 24, 24], "depths": [1, 1, 2, 1]},
    ),
    Architecture(
        "ResNet",
        "ResNetForImageClassification",
        ("image",),
        {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 24], "depths": [1, 1, 2, 1]},
    ),
    Architecture(
        "SegFormer",
        "SegformerForSemanticSegmentation",
        ("image",),
        {
            "hidden_sizes": [8, 16, 16, 24],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4],
            "decoder_hidden_size": 16,
        },
    ),
    # sound
    Architecture("Wav2Vec2", "Wav2Vec2ForCTC", ("sound",), _SPEECH),
    Architecture("HuBERT", "HubertForCTC", ("sound",), _SPEECH),
    Architecture(
        "Whisper",
        "WhisperForConditionalGeneration",
        ("mel features", "translation"),
        {
            **_SEQ2SEQ,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
    Architecture(
        "AST",
        "ASTForAudioClassification",
        ("spectrogram",),
        {
            **{k: v for k, v in _VIT.items() if k != "image_size"},
            "max_length": 32,
            "num_mel_bins": 16,
        },
    ),
    # several at once, series
    Architecture(
        "ViLT",
        "ViltForImagesAndTextClassification",
        (*_TEXT, "images"),
        {**_VIT, "vocab_size": 99, "num_images": 1, "modality_type_vocab_size": 3},
    ),
    Architecture(
        "PatchTST",
        "PatchTSTForClassification",
        ("series",),
        {
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "d_model": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "num_targets": 4,
        },
    ),
    Architecture(
        "Decision Transformer",
        "DecisionTransformerModel",
        ("states", "actions", "rewards", "returns", "times"),
        {
            "state_dim": 5,
            "act_dim": 3,
            "hidden_size": 32,
            "n_layer": 4,
            "n_head": 4,
            "max_ep_len": 64,
        },
    ),
)
