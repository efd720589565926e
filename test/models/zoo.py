"""Models of transformers and timm at toy size, made from configurations, with random weights. Nothing is downloaded."""

import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import timm
import torch
import transformers
from torch import Tensor
from torch.nn import Module

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()

Attention = Literal["eager", "sdpa"]
Batch = dict[str, Tensor]


class Toy(NamedTuple):
    """A model, what it is called with, and how its library is asked for what a setting says.

    make has the weights of the global random state, and batch and loss its dropout.
    """

    make: Callable[[Attention], Module]
    batch: Callable[[], Batch]
    loss: Callable[[Module, Batch], Tensor]
    has_attentions: Callable[[Module], bool]  # whether "eager" and "sdpa" are different models
    has_checkpoint: Callable[[Module], bool]
    checkpoint: Callable[[Module, bool], None]  # with reentry or without


TOKENS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TWO_STACKS = TOKENS | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 0,
}
EXPERTS = TOKENS | {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PATCHES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 8,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
STAGES = {"hidden_sizes": (8, 16, 16, 16), "depths": (1, 1, 1, 1), "num_labels": 8, "image_size": 32}
SOUND = TOKENS | {
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 2,
    "mask_time_prob": 0.2,
}


def _tokens(length: int = 16) -> Tensor:
    return torch.randint(3, 64, (2, length))


def _text() -> Batch:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens}


def _image(side: int = 32) -> Batch:
    return {"pixel_values": torch.randn(2, 3, side, side), "labels": torch.randint(8, (2,))}


def _sound() -> Batch:
    return {"input_values": torch.randn(2, 800), "labels": _tokens(4)}


def _spectrogram() -> Batch:
    return {"input_values": torch.randn(2, 32, 16), "labels": torch.randint(8, (2,))}


def _speech() -> Batch:
    return {"input_features": torch.randn(2, 8, 32), "labels": _tokens(8)}


def _pairs() -> Batch:
    return {"input_ids": _tokens(), "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": torch.tensor(True)}


def _question() -> Batch:
    return {"input_ids": _tokens(), "pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.rand(2, 8)}


def _of_transformers(name: str, batch: Callable[[], Batch], **config: Any) -> Toy:
    kind = getattr(transformers, name)
    return Toy(
        make=lambda attention: kind._from_config(kind.config_class(**config), attn_implementation=attention),
        batch=batch,
        loss=lambda model, batch: model(**batch).loss,
        has_attentions=lambda model: model._supports_sdpa,
        has_checkpoint=lambda model: model.supports_gradient_checkpointing,
        checkpoint=lambda model, reentrant: model.gradient_checkpointing_enable({"use_reentrant": reentrant}),
    )


def _of_timm(name: str, side: int = 32, **options: Any) -> Toy:
    def make(attention: Attention) -> Module:
        timm.layers.set_fused_attn(attention == "sdpa")
        try:
            return timm.create_model(name, num_classes=8, drop_rate=0.1, drop_path_rate=0.1, **options)
        except TypeError:  # without drop_path_rate
            return timm.create_model(name, num_classes=8, drop_rate=0.1, **options)

    def checkpoint(model: Module, reentrant: bool) -> None:
        timm.layers.set_reentrant_ckpt(reentrant)
        model.set_grad_checkpointing(True)

    def has_checkpoint(model: Module) -> bool:
        try:
            model.set_grad_checkpointing(True)
        except (AssertionError, AttributeError):
            return False
        return True

    return Toy(
        make=make,
        batch=lambda: _image(side),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"]),
        has_attentions=lambda model: any(hasattr(each, "fused_attn") for each in model.modules()),
        has_checkpoint=has_checkpoint,
        checkpoint=checkpoint,
    )


def _texts(config: dict[str, Any], names: dict[str, dict[str, Any]]) -> dict[str, Toy]:
    return {name: _of_transformers(name, _text, **config | options) for name, options in names.items()}


def _images(config: dict[str, Any], names: dict[str, dict[str, Any]]) -> dict[str, Toy]:
    return {name: _of_transformers(name, _image, **config | options) for name, options in names.items()}


ZOO: dict[str, Toy] = {
    **_texts(
        TOKENS,
        {
            "LlamaForCausalLM": {},
            "MistralForCausalLM": {},
            "Qwen3ForCausalLM": {"head_dim": 8},
            "Gemma2ForCausalLM": {"head_dim": 8},
            "Gemma3ForCausalLM": {"head_dim": 8},
            "PhiForCausalLM": {},
            "Phi3ForCausalLM": {},
            "StableLmForCausalLM": {},
            "CohereForCausalLM": {},
            "Glm4ForCausalLM": {"head_dim": 8},
            "GPT2LMHeadModel": {},
            "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
            "GPTNeoXForCausalLM": {},
            "GPTJForCausalLM": {"rotary_dim": 8},
            "OPTForCausalLM": {"ffn_dim": 64, "word_embed_proj_dim": 32},
            "BloomForCausalLM": {},
            "FalconForCausalLM": {},
            "MambaForCausalLM": {},
            "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
            "RwkvForCausalLM": {},
            "Lfm2ForCausalLM": {},
            "BertForMaskedLM": {},
            "DistilBertForMaskedLM": {"hidden_dim": 64},
            "AlbertForMaskedLM": {},
            "DebertaV2ForMaskedLM": {},
            "ModernBertForMaskedLM": {},
            "FNetForMaskedLM": {},
            "LongformerForMaskedLM": {"attention_window": 4},
            "NystromformerForMaskedLM": {},
            "ReformerModelWithLMHead": {
                "is_decoder": True,
                "attn_layers": ["local", "lsh"],
                "axial_pos_shape": (4, 4),
                "axial_pos_embds_dim": (16, 16),
                "feed_forward_size": 64,
                "attention_head_size": 8,
                "local_attn_chunk_length": 8,
                "lsh_attn_chunk_length": 8,
                "num_buckets": 2,
                "hash_seed": 1,  # and no dropout, whose seeds the model has from torch.seed()
                "hidden_dropout_prob": 0.0,
                "local_attention_probs_dropout_prob": 0.0,
                "lsh_attention_probs_dropout_prob": 0.0,
            },
            "T5ForConditionalGeneration": {"d_ff": 64, "d_kv": 8, "decoder_start_token_id": 0},
        },
    ),
    **_texts(
        EXPERTS,
        {
            "MixtralForCausalLM": {},
            "Qwen3MoeForCausalLM": {},
            "OlmoeForCausalLM": {},
            "GptOssForCausalLM": {"head_dim": 8},
            "DeepseekV3ForCausalLM": {
                "num_key_value_heads": 4,
                "n_routed_experts": 4,
                "n_group": 2,
                "topk_group": 1,
                "kv_lora_rank": 16,
                "q_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
                "first_k_dense_replace": 1,
            },
        },
    ),
    **_texts(
        TWO_STACKS,
        {
            "BartForConditionalGeneration": {},
            "MarianMTModel": {"decoder_vocab_size": 64},
            "PegasusForConditionalGeneration": {},
        },
    ),
    **_images(
        PATCHES,
        {
            "ViTForImageClassification": {},
            "BeitForImageClassification": {},
            "Dinov2ForImageClassification": {},
        },
    ),
    **_images(
        STAGES,
        {
            "ConvNextForImageClassification": {},
            "ResNetForImageClassification": {"embedding_size": 8, "layer_type": "basic"},
            "SegformerForImageClassification": {"num_attention_heads": (1, 1, 2, 2), "decoder_hidden_size": 16},
        },
    ),
    "SwinForImageClassification": _of_transformers(
        "SwinForImageClassification",
        _image,
        **{name: each for name, each in PATCHES.items() if name != "num_attention_heads"}
        | {"embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4, "patch_size": 4},
    ),
    "Wav2Vec2ForCTC": _of_transformers("Wav2Vec2ForCTC", _sound, **SOUND),
    "HubertForCTC": _of_transformers("HubertForCTC", _sound, **SOUND),
    "ASTForAudioClassification": _of_transformers(
        "ASTForAudioClassification",
        _spectrogram,
        **PATCHES | {"num_mel_bins": 16, "max_length": 32, "frequency_stride": 8, "time_stride": 8},
    ),
    "WhisperForConditionalGeneration": _of_transformers(
        "WhisperForConditionalGeneration",
        _speech,
        **TWO_STACKS
        | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32, "decoder_start_token_id": 1},
    ),
    "CLIPModel": _of_transformers(
        "CLIPModel", _pairs, text_config=TOKENS, vision_config=PATCHES, projection_dim=16
    ),
    "SiglipModel": _of_transformers(
        "SiglipModel", _pairs, text_config=TOKENS | {"projection_size": 32}, vision_config=PATCHES
    ),
    "ViltForQuestionAnswering": _of_transformers("ViltForQuestionAnswering", _question, **PATCHES, vocab_size=64),
    **{
        name: _of_timm(name, img_size=32, embed_dim=32, depth=2, num_heads=2, patch_size=8)
        for name in (
            "vit_tiny_patch16_224",
            "vit_small_patch16_rope_224",
            "deit3_small_patch16_224",
            "beit_base_patch16_224",
            "cait_xxs24_224",
            "xcit_nano_12_p16_224",
            "convit_tiny",
            "samvit_base_patch16_224",
        )
    },
    **{
        name: _of_timm(name, img_size=32, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4))
        for name in ("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256")
    },
    **{
        name: _of_timm(name, layers=(1, 1, 1, 1), channels=(8, 16, 24, 32))
        for name in ("resnet18", "seresnet18", "skresnet18")
    },
    **{
        name: _of_timm(name, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32))
        for name in ("convnext_atto", "convnextv2_atto", "edgenext_xx_small", "mambaout_femto")
    },
    "resnetv2_50": _of_timm("resnetv2_50", layers=(1, 1, 1, 1), channels=(16, 32, 48, 64), stem_chs=8),
    "densenet121": _of_timm("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    "eva02_tiny_patch14_224": _of_timm(
        "eva02_tiny_patch14_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=2
    ),
    "davit_tiny": _of_timm("davit_tiny", depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 4)),
    "fastvit_t8": _of_timm("fastvit_t8", layers=(1, 1, 1, 1), embed_dims=(16, 16, 32, 32)),
    "hiera_tiny_224": _of_timm("hiera_tiny_224", side=64, img_size=(64, 64), embed_dim=16, stages=(1, 1, 1, 1)),
    "sequencer2d_s": _of_timm(
        "sequencer2d_s", layers=(1, 1, 1, 1), embed_dims=(16, 32, 32, 32), hidden_sizes=(8, 8, 8, 8)
    ),
    "twins_svt_small": _of_timm(
        "twins_svt_small", img_size=32, embed_dims=(8, 16, 32, 32), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4)
    ),
    "levit_128s": _of_timm(
        "levit_128s", side=64, img_size=64, embed_dim=(16, 32, 32), num_heads=(1, 2, 2), depth=(1, 1, 1)
    ),
    "visformer_tiny": _of_timm("visformer_tiny", side=64, img_size=64, embed_dim=32, depth=(1, 1, 1)),
    "pvt_v2_b0": _of_timm(
        "pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 16), num_heads=(1, 1, 2, 2)
    ),
    "mobilenetv3_small_050": _of_timm("mobilenetv3_small_050"),
}
