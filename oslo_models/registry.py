"""Architectures of the zoo, one line each, and lookup of their classes by name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from oslo_models.installed import installed_version, release_of

_ALL = {
    # transformers' model type: the prefix of its class names
    "afmoe": "Afmoe",
    "albert": "Albert",
    "apertus": "Apertus",
    "apertus1p5": "Apertus1p5",
    "apertus1p5_text": "Apertus1p5Text",
    "arcee": "Arcee",
    "aria": "Aria",
    "aria_text": "AriaText",
    "audio-spectrogram-transformer": "AST",
    "audioflamingo3": "AudioFlamingo3",
    "axk1": "AXK1",
    "axk2": "AXK2",
    "aya_vision": "AyaVision",
    "bailing_hybrid": "BailingHybrid",
    "bamba": "Bamba",
    "bart": "Bart",
    "beam": "Beam",
    "beit": "Beit",
    "bert": "Bert",
    "bert-generation": "BertGeneration",
    "big_bird": "BigBird",
    "bigbird_pegasus": "BigBirdPegasus",
    "biogpt": "BioGpt",
    "bit": "Bit",
    "bitnet": "BitNet",
    "blenderbot": "Blenderbot",
    "blenderbot-small": "BlenderbotSmall",
    "blip": "Blip",
    "blip-2": "Blip2",
    "bloom": "Bloom",
    "blt": "Blt",
    "camembert": "Camembert",
    "canary": "Canary",
    "canine": "Canine",
    "chameleon": "Chameleon",
    "clip": "CLIP",
    "codegen": "CodeGen",
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "cohere2_moe": "Cohere2Moe",
    "cohere2_vision": "Cohere2Vision",
    "cohere_asr": "CohereAsr",
    "cohere_compass": "CohereCompass",
    "cohere_compass_text": "CohereCompass",
    "conditional_detr": "ConditionalDetr",
    "convbert": "ConvBert",
    "convnext": "ConvNext",
    "convnextv2": "ConvNextV2",
    "cosmos3_edge": "Cosmos3Edge",
    "cosmos3_omni": "Cosmos3Omni",
    "cpmant": "CpmAnt",
    "ctrl": "CTRL",
    "cvt": "Cvt",
    "cwm": "Cwm",
    "data2vec-audio": "Data2VecAudio",
    "data2vec-text": "Data2VecText",
    "data2vec-vision": "Data2VecVision",
    "dbrx": "Dbrx",
    "deberta": "Deberta",
    "deberta-v2": "DebertaV2",
    "deepseek_ocr2": "DeepseekOcr2",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "deepseek_v32": "DeepseekV32",
    "deepseek_v4": "DeepseekV4",
    "deepseek_vl": "DeepseekVL",
    "deepseek_vl_hybrid": "DeepseekVLHybrid",
    "deformable_detr": "DeformableDetr",
    "deit": "DeiT",
    "depth_anything": "DepthAnything",
    "detr": "Detr",
    "diffllama": "DiffLlama",
    "dinov2": "Dinov2",
    "dinov2_with_registers": "Dinov2WithRegisters",
    "dinov3_vit": "DINOv3ViT",
    "distilbert": "DistilBert",
    "doge": "Doge",
    "donut-swin": "DonutSwin",
    "dory": "Dory",
    "dots1": "Dots1",
    "dots3_note_text": "Dots3Note",
    "dpr": "DPR",
    "dpt": "DPT",
    "efficientnet": "EfficientNet",
    "electra": "Electra",
    "emu3": "Emu3",
    "encoder-decoder": "EncoderDecoder",
    "ernie": "Ernie",
    "ernie4_5": "Ernie4_5",
    "ernie4_5_moe": "Ernie4_5_Moe",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoe",
    "esm": "Esm",
    "esmc": "Esmc",
    "eurobert": "EuroBert",
    "exaone4": "Exaone4",
    "exaone4_5": "Exaone4_5_",
    "exaone_moe": "ExaoneMoe",
    "falcon": "Falcon",
    "falcon_h1": "FalconH1",
    "falcon_mamba": "FalconMamba",
    "flaubert": "Flaubert",
    "flex_olmo": "FlexOlmo",
    "flint": "Flint",
    "florence2": "Florence2",
    "fnet": "FNet",
    "focalnet": "FocalNet",
    "fsmt": "FSMT",
    "fun_asr_nano": "FunAsrNano",
    "funnel": "Funnel",
    "fuyu": "Fuyu",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "gemma3_text": "Gemma3",
    "gemma3n_text": "Gemma3n",
    "gemma4": "Gemma4",
    "gemma4_text": "Gemma4",
    "gemma4_unified": "Gemma4Unified",
    "gemma4_unified_text": "Gemma4Unified",
    "git": "Git",
    "glm": "Glm",
    "glm4": "Glm4",
    "glm4_moe": "Glm4Moe",
    "glm46v": "Glm46V",
    "glm4_moe_lite": "Glm4MoeLite",
    "glm4v": "Glm4v",
    "glm4v_moe": "Glm4vMoe",
    "glm_moe_dsa": "GlmMoeDsa",
    "glm_ocr": "GlmOcr",
    "glmasr": "GlmAsr",
    "got_ocr2": "GotOcr2",
    "gpt2": "GPT2",
    "gpt_bigcode": "GPTBigCode",
    "gpt_neo": "GPTNeo",
    "gpt_neox": "GPTNeoX",
    "gpt_neox_japanese": "GPTNeoXJapanese",
    "gpt_oss": "GptOss",
    "gptj": "GPTJ",
    "granite": "Granite",
    "granite4_vision": "Granite4Vision",
    "granite_docling": "GraniteDocling",
    "granite_speech": "GraniteSpeech",
    "granite_speech5_ctc": "GraniteSpeech5",
    "granite_speech_plus": "GraniteSpeechPlus",
    "granite_swa": "GraniteSWA",
    "granitemoe": "GraniteMoe",
    "granitemoe_swa": "GraniteMoeSWA",
    "granitemoehybrid": "GraniteMoeHybrid",
    "granitemoeshared": "GraniteMoeShared",
    "gte": "Gte",
    "grounding-dino": "GroundingDino",
    "helium": "Helium",
    "hiera": "Hiera",
    "hrm_text": "HrmText",
    "hubert": "Hubert",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "hunyuan_v1_moe": "HunYuanMoEV1",
    "hunyuan_vl": "HunYuanVL",
    "hy_v3": "HYV3",
    "hy_v4": "HYV4",
    "hy_v4_vl": "HYV4VL",
    "hy_v4_vl_text": "HYV4VL",
    "hyperclovax": "HyperCLOVAX",
    "hyperclovax_vision_v2": "HyperCLOVAXVisionV2",
    "ibert": "IBert",
    "idefics": "Idefics",
    "idefics2": "Idefics2",
    "idefics3": "Idefics3",
    "ijepa": "IJepa",
    "imagegpt": "ImageGPT",
    "inkling2": "Inkling2",
    "inkling2_loop": "Inkling2Loop",
    "inkling2_loop_text": "Inkling2Loop",
    "inkling2_text": "Inkling2",
    "inkling_mm_model": "Inkling",
    "inkling_text": "Inkling",
    "instructblip": "InstructBlip",
    "instructblipvideo": "InstructBlipVideo",
    "internvl": "InternVL",
    "jais2": "Jais2",
    "jamba": "Jamba",
    "janus": "Janus",
    "jetmoe": "JetMoe",
    "jina_embeddings_v3": "JinaEmbeddingsV3",
    "kimi_k25": "Kimi_K25",
    "kimi_linear": "KimiLinear",
    "kolibri1": "Kolibri1",
    "kosmos-2": "Kosmos2",
    "kosmos-2.5": "Kosmos2_5",
    "laguna": "Laguna",
    "lara_mini": "LaraMini",
    "lasr_ctc": "Lasr",
    "layoutlm": "LayoutLM",
    "layoutlmv3": "LayoutLMv3",
    "led": "LED",
    "lfm2": "Lfm2",
    "lfm2_moe": "Lfm2Moe",
    "lfm2_vl": "Lfm2Vl",
    "lfm3": "Lfm3",
    "lfm3_vl": "Lfm3Vl",
    "lighton_ocr": "LightOnOcr",
    "lilt": "Lilt",
    "llava_next_video": "LlavaNextVideo",
    "longcat_flash": "LongcatFlash",
    "llama": "Llama",
    "llama4_text": "Llama4",
    "llava": "Llava",
    "llava_next": "LlavaNext",
    "llava_onevision": "LlavaOnevision",
    "longformer": "Longformer",
    "longt5": "LongT5",
    "luke": "Luke",
    "lxmert": "Lxmert",
    "m2m_100": "M2M100",
    "mamba": "Mamba",
    "mamba2": "Mamba2",
    "marian": "Marian",
    "markuplm": "MarkupLM",
    "mbart": "MBart",
    "megatron-bert": "MegatronBert",
    "mellum": "Mellum",
    "metaclip_2": "MetaClip2",
    "mimo_v2_flash": "MiMoV2Flash",
    "minicpm3": "MiniCPM3",
    "minicpm_ocr": "MiniCPMOcr",
    "minicpmv4_6": "MiniCPMV4_6",
    "minicpmv4_7": "MiniCPMV4_7",
    "minimax": "MiniMax",
    "minimax_m2": "MiniMaxM2",
    "minimax_m3_vl": "MiniMaxM3",
    "minimax_m3_vl_text": "MiniMaxM3VL",
    "ministral": "Ministral",
    "ministral3": "Ministral3",
    "mistral": "Mistral",
    "mistral3": "Mistral3",
    "mistral4": "Mistral4",
    "mixtral": "Mixtral",
    "mllama": "Mllama",
    "mm-grounding-dino": "MMGroundingDino",
    "mobilebert": "MobileBert",
    "mobilevit": "MobileViT",
    "mobilevitv2": "MobileViTV2",
    "modernbert": "ModernBert",
    "modernbert-decoder": "ModernBertDecoder",
    "molmo2": "Molmo2",
    "moonshine": "Moonshine",
    "moss_transcribe_diarize": "MossTranscribeDiarize",
    "mpnet": "MPNet",
    "mpt": "Mpt",
    "mt5": "MT5",
    "muse_glimmer": "MuseGlimmer",
    "musicflamingo": "MusicFlamingo",
    "mvp": "Mvp",
    "nanochat": "NanoChat",
    "nemotron": "Nemotron",
    "nemotron_h": "NemotronH",
    "nllb-moe": "NllbMoe",
    "nomic_bert": "NomicBert",
    "olmo": "Olmo",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "olmo_hybrid": "OlmoHybrid",
    "olmoe": "Olmoe",
    "omniasr": "OmniASR",
    "omniasr_ctc": "OmniASR",
    "openai-gpt": "OpenAIGPT",
    "opt": "OPT",
    "ovis2": "Ovis2",
    "owlv2": "Owlv2",
    "owlvit": "OwlViT",
    "paddleocr_vl": "PaddleOCR",
    "paligemma": "PaliGemma",
    "parakeet_ctc": "Parakeet",
    "pegasus": "Pegasus",
    "pegasus_x": "PegasusX",
    "persimmon": "Persimmon",
    "phi": "Phi",
    "phi3": "Phi3",
    "phi4_multimodal": "Phi4Multimodal",
    "phimoe": "Phimoe",
    "pix2struct": "Pix2Struct",
    "pixtral": "Pixtral",
    "plbart": "PLBart",
    "poolformer": "PoolFormer",
    "pp_formulanet": "PPFormulaNet",
    "prophetnet": "ProphetNet",
    "pvt": "Pvt",
    "pvt_v2": "PvtV2",
    "qianfan_ocr": "QianfanOCR",
    "qwen2": "Qwen2",
    "qwen2_5_omni_thinker": "Qwen2_5OmniThinker",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen2_audio": "Qwen2Audio",
    "qwen2_moe": "Qwen2Moe",
    "qwen2_vl": "Qwen2VL",
    "qwen3": "Qwen3",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_asr": "Qwen3ASR",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinker",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen4_exp": "Qwen4Exp",
    "qwen4_exp_text": "Qwen4Exp",
    "rag": "Rag",
    "recurrent_gemma": "RecurrentGemma",
    "reformer": "Reformer",
    "regnet": "RegNet",
    "rembert": "RemBert",
    "resnet": "ResNet",
    "roberta": "Roberta",
    "roberta-prelayernorm": "RobertaPreLayerNorm",
    "roc_bert": "RoCBert",
    "roformer": "RoFormer",
    "rt_detr": "RTDetr",
    "rt_detr_v2": "RTDetrV2",
    "rwkv": "Rwkv",
    "sam": "Sam",
    "sam_hq": "SamHQ",
    "seamless_m4t": "SeamlessM4T",
    "seamless_m4t_v2": "SeamlessM4Tv2",
    "segformer": "Segformer",
    "seed_oss": "SeedOss",
    "sew": "SEW",
    "sew-d": "SEWD",
    "siglip": "Siglip",
    "siglip2": "Siglip2",
    "smollm3": "SmolLM3",
    "smolvlm": "SmolVLM",
    "solar_open": "SolarOpen",
    "speech-encoder-decoder": "SpeechEncoderDecoder",
    "speech_to_text": "Speech2Text",
    "squeezebert": "SqueezeBert",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
    "step3p7": "Step3p7",
    "swiftformer": "SwiftFormer",
    "swin": "Swin",
    "swinv2": "Swinv2",
    "switch_transformers": "SwitchTransformers",
    "t5": "T5",
    "t5gemma": "T5Gemma",
    "table-transformer": "TableTransformer",
    "tapas": "Tapas",
    "trocr": "TrOCR",
    "udop": "Udop",
    "ultrabert": "Ultrabert",
    "umt5": "UMT5",
    "unispeech": "UniSpeech",
    "unispeech-sat": "UniSpeechSat",
    "vaultgemma": "VaultGemma",
    "vibevoice_asr": "VibeVoiceAsr",
    "video_llama_3": "VideoLlama3",
    "video_llava": "VideoLlava",
    "videomae": "VideoMAE",
    "vipllava": "VipLlava",
    "vision-encoder-decoder": "VisionEncoderDecoder",
    "visual_bert": "VisualBert",
    "vit": "ViT",
    "vit_mae": "ViTMAE",
    "vit_msn": "ViTMSN",
    "voxtral": "Voxtral",
    "voxtral_realtime": "VoxtralRealtime",
    "wav2vec2": "Wav2Vec2",
    "wav2vec2-bert": "Wav2Vec2Bert",
    "wav2vec2-conformer": "Wav2Vec2Conformer",
    "wavlm": "WavLM",
    "whisper": "Whisper",
    "xglm": "XGLM",
    "xlm": "XLM",
    "xlm-roberta": "XLMRoberta",
    "xlm-roberta-xl": "XLMRobertaXL",
    "xlnet": "XLNet",
    "xlstm": "xLSTM",
    "xmod": "Xmod",
    "yolos": "Yolos",
    "youtu": "Youtu",
    "zamba": "Zamba",
    "zamba2": "Zamba2",
    "zaya": "Zaya",
}
NO_SEQUENCE_PARALLEL = {
    "convbert": "its attention is replicated, and reads all tokens",
    **dict.fromkeys(("bit", "convnext", "convnextv2", "efficientnet"), "its hidden states are images"),
    **dict.fromkeys(("mobilevit", "mobilevitv2", "poolformer"), "its hidden states are images"),
    **dict.fromkeys(("regnet", "resnet", "swiftformer"), "its hidden states are images"),
    **dict.fromkeys(
        ("deepseek_v4", "gemma3n_text", "hy_v4", "hy_v4_vl", "hy_v4_vl_text"), "its blocks read several hidden states"
    ),
    "ernie4_5_vl_moe": "its experts read the kinds of all tokens",
    "fnet": "its Fourier transforms read all tokens",
    **dict.fromkeys(("grounding-dino", "mm-grounding-dino"), "its blocks read texts and images"),
    **dict.fromkeys(("deformable_detr", "rt_detr", "rt_detr_v2"), "its attention samples features of all tokens"),
    "ibert": "its blocks compute with integers and scales of whole tensors",
    "luke": "its blocks read hidden states of words and of entities",
    "reformer": "its blocks read two hidden states, and each changes the other",
    **dict.fromkeys(("sam", "sam_hq"), "its hidden states have the height and the width of the image"),
    "squeezebert": "its blocks read channels before tokens",
    **dict.fromkeys(
        (
            *("Glm4vVisionModel", "Glm4vMoeVisionModel", "GlmOcrVisionModel", "PaddleOCRVisionModel"),
            *("PaddleOCRVisionTransformer", "Qwen3VLVisionModel", "Qwen3VLMoeVisionModel", "Qwen3_5VisionModel"),
            *("Qwen3_5MoeVisionModel", "Qwen4ExpVisionModel", "CohereCompassVisionModel", "Cosmos3EdgeVisionModel"),
            *("Exaone4_5_VisionModel", "Lfm3VlVisionModel", "MuseGlimmerVisionModel", "Qwen3ASREncoder"),
            *("Kimi_K25VisionModel", "Inkling2VisionModel"),
        ),
        "its hidden states have no dimension of rows",
    ),
}
"""Model types and classes that ``sequence_parallel=True`` does not support, with the reason."""

_HEADS = """
    afmoe albert apertus apertus1p5 apertus1p5_text arcee aria aria_text audio-spectrogram-transformer audioflamingo3
    axk1 axk2 aya_vision bart beam beit bert bert-generation biogpt bitnet blenderbot blenderbot-small blip-2 camembert
    clip cohere cohere2 cohere2_moe cohere2_vision cohere_compass cohere_compass_text cosmos3_edge cosmos3_omni ctrl cwm
    data2vec-audio data2vec-text data2vec-vision deepseek_v2 deepseek_v3 deepseek_v32 deepseek_vl deepseek_vl_hybrid
    deit depth_anything diffllama dinov2 dinov2_with_registers distilbert dory dots1 dots3_note_text dpr dpt electra
    emu3 encoder-decoder ernie ernie4_5 ernie4_5_moe exaone4 exaone4_5 exaone_moe falcon flex_olmo florence2
    fun_asr_nano fuyu gemma gemma3 gemma3_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm46v
    glm4_moe glm4_moe_lite glm4v glm4v_moe glm_moe_dsa glm_ocr glmasr got_ocr2 gpt2 gpt_bigcode gpt_neox gptj granite
    granite4_vision granite_docling granite_speech granite_speech_plus granitemoe granitemoeshared helium hrm_text
    hubert hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hy_v3 hyperclovax hyperclovax_vision_v2 idefics2 idefics3 ijepa
    internvl jais2 janus kimi_k25 kolibri1 laguna layoutlm lighton_ocr llama llava llava_next llava_next_video
    llava_onevision longcat_flash m2m_100 marian mbart mellum metaclip_2 minicpm3 minimax_m2 ministral ministral3
    mistral mistral3 mistral4 mixtral mobilebert modernbert modernbert-decoder moonshine mt5 muse_glimmer musicflamingo
    nanochat nemotron olmo olmo2 olmo3 olmoe omniasr omniasr_ctc opt ovis2 paddleocr_vl paligemma pegasus persimmon phi
    phi3 pix2struct pixtral plbart qianfan_ocr qwen2 qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_asr qwen3_moe
    qwen3_vl qwen3_vl_moe rag roberta roberta-prelayernorm roc_bert seed_oss sew siglip siglip2 smollm3 smolvlm
    solar_open speech-encoder-decoder stablelm starcoder2 t5 umt5 unispeech unispeech-sat video_llama_3 video_llava
    videomae vipllava vision-encoder-decoder vit vit_mae vit_msn voxtral wav2vec2 whisper xlm-roberta xlm-roberta-xl
    yolos youtu
"""
_KEYS = """
    blip bloom cpmant deberta-v2 flaubert flint gemma2 git gpt_neo gpt_neox_japanese gpt_oss granite_swa
    granitemoe_swa lxmert megatron-bert mimo_v2_flash mpnet mpt openai-gpt rembert roformer sew-d speech_to_text tapas
    trocr vaultgemma visual_bert xglm xlm
"""
_HEADS_AND_MIXERS = """
    bamba falcon_h1 granitemoehybrid jamba lara_mini lfm2 lfm2_moe lfm2_vl lfm3 nemotron_h olmo_hybrid qwen3_5
    qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next
"""
_MIXERS = "falcon_mamba mamba mamba2"
MIXERS_WITH_CONTEXT = {
    **dict.fromkeys(_HEADS_AND_MIXERS.split(), "heads, mixers"),
    **dict.fromkeys(_MIXERS.split(), "mixers"),
}
"""Model types with recurrent or convolutional mixers that ``context_parallel_size`` supports.

Each rank computes some heads or channels of a mixer for all tokens.
"""
CONTEXT_PARALLEL = {
    **dict.fromkeys(_HEADS.split(), "heads"),
    **dict.fromkeys(_KEYS.split(), "keys"),
    **MIXERS_WITH_CONTEXT,
}
"""Model types that ``context_parallel_size`` supports, and what their attention exchanges: heads, or keys and values.

Each type matches transformers in drawn configurations, and its blocks save less on each rank. Other types were not
tested, or gather the tokens: other linear attention, other convolutions, windows of images, the blocks of Zamba.
DeBERTa is TorchScript in older releases of transformers.
"""

NO_CONTEXT_PARALLEL = dict.fromkeys(
    (
        *("CohereCompassVisionModel", "Cosmos3EdgeVisionModel", "Exaone4_5_VisionModel", "Glm4vVisionModel"),
        *("Glm4vMoeVisionModel", "GlmOcrVisionModel", "MuseGlimmerVisionModel", "PaddleOCRVisionModel"),
        *("PaddleOCRVisionTransformer", "Qwen3ASREncoder", "Qwen3VLVisionModel", "Qwen3VLMoeVisionModel"),
        *("Qwen3_5VisionModel", "Qwen3_5MoeVisionModel", "Kimi_K25VisionModel"),
    ),
    "its hidden states have no dimension of rows",
)
"""Classes of these types that ``context_parallel_size`` does not support, with the reason."""

NO_DIVIDED_IMAGES = {
    **dict.fromkeys(("emu3", "fuyu", "gemma4_unified"), "it has no tower of images"),
    "git": "its rows have one image each, or the frames of one video",
    **dict.fromkeys(
        ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), "its tower reads the patches of all images as one image"
    ),
}
"""Model types that ``tower_parallel="images"`` does not support, with the reason."""

MTP_HEADS = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite"), ("num_nextn_predict_layers", 0)),
    "qwen3_next": ("num_nextn_predict_layers", 1),
    "mimo_v2_flash": ("num_nextn_predict_layers", 3),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), ("mtp_num_hidden_layers", 1)),
}
"""Model types that ``mtp_heads`` supports: the attribute of the configuration with the number of heads, and the number
of heads of configurations without it."""

_SINCE = {
    **dict.fromkeys(("bailing_hybrid", "kolibri1", "ultrabert"), (5, 20)),
    **dict.fromkeys(("beam", "flint"), (5, 21)),
    **dict.fromkeys(("dots3_note_text", "granite_docling", "inkling2_text", "internlm3", "iquestcoder"), (5, 23)),
    **dict.fromkeys(("lfm3", "lfm3_vl"), (5, 23)),
    **dict.fromkeys(("apertus1p5_text", "dory", "exaone", "hy_v4_vl_text", "inkling2_loop_text", "lara_mini"), (5, 24)),
    **dict.fromkeys(("omniasr", "omniasr_ctc", "sarvam_mla", "sarvam_moe", "dinov2"), (5, 24)),
    **dict.fromkeys(("depth_anything", "dinov2_with_registers", "hy_v4_vl", "moss_transcribe_diarize"), (5, 24)),
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), (5, 24)),
    **dict.fromkeys(("apertus1p5", "inkling2", "inkling2_loop", "molmo2", "vibevoice_asr"), (5, 24)),
    **dict.fromkeys(("rt_detr", "rt_detr_v2"), (5, 24)),
    **dict.fromkeys(("git", "gte", "hyperclovax_vision_v2", "minicpmv4_7"), (5, 18)),
    "minicpmv4_6": (5, 19),
    **dict.fromkeys(("minicpm_ocr", "video_llava"), (5, 21)),
    "minimax_m3_vl": (5, 23),
}
"""First release of transformers that has a model type and computes it right, if older releases are supported."""
_VERSION = installed_version("transformers") or "999"  # assume that a source tree without metadata is new
INSTALLED = release_of(_VERSION)
"""Release of the installed transformers, such as ``(5, 24)``."""

ARCHITECTURES = {kind: prefix for kind, prefix in _ALL.items() if _SINCE.get(kind, ()) <= INSTALLED}
"""Class name prefix of each model type in the installed transformers."""
NEWER = {kind: prefix for kind, prefix in _ALL.items() if kind not in ARCHITECTURES}
"""Class name prefix of each model type that needs a newer release of transformers."""

_ALL_SAME = {
    **dict.fromkeys(("exaone", "internlm3", "iquestcoder"), "llama"),
    "sarvam_mla": "deepseek_v3",
    "sarvam_moe": "glm4_moe",
    **{"glmga": "glm46v", "pp_chart2table": "got_ocr2"},
}
SAME_CLASSES = {kind: other for kind, other in _ALL_SAME.items() if _SINCE.get(kind, ()) <= INSTALLED}
"""Model types with a separate configuration class that share the model classes of another type."""


def needed_release(model_type: str) -> str:
    """Return a sentence with the release that a model type needs, or "" if the installed release supports it."""
    if _SINCE.get(model_type, ()) <= INSTALLED:
        return ""
    release = ".".join(map(str, _SINCE[model_type]))
    return f"{model_type} needs transformers {release} or newer, and {_VERSION} is installed"


def module_name(model_type: str) -> str:
    """Return the name of an architecture's module."""
    return model_type.replace("-", "_").replace(".", "_")


def model_type_of(cls: type) -> str | None:
    """Return the model type of a class of the zoo or of its subclass. ``None`` for other classes."""
    by_module = {f"{__package__}.models.{module_name(kind)}": kind for kind in ARCHITECTURES}
    return next((by_module[base.__module__] for base in cls.__mro__ if base.__module__ in by_module), None)


def count_mtp_heads(cls: type, config: Any) -> int:
    """Return the number of heads for multi-token prediction in the checkpoint of a configuration.

    Args:
        cls: the class of the model.
    """
    attribute, default = MTP_HEADS.get(model_type_of(cls) or "", ("", 0))
    found = getattr(config, attribute, None)
    return default if found is None else int(found)


def load(model_type: str) -> ModuleType:
    """Import the module of an architecture."""
    return importlib.import_module(f"oslo_models.models.{module_name(model_type)}")


_BASE = "PreTrainedModel"
"""End of the name of the base class in transformers."""


def exports(model_type: str) -> dict[str, Any]:
    """Return the public objects of an architecture by name: classes, configurations, layers, and transformers' base."""
    prefix, module = ARCHITECTURES[model_type], load(model_type)
    named = {name: value for name, value in vars(module).items() if name.startswith(prefix)}
    found = {name: value for name, value in named.items() if not name.endswith("Parallel")}  # base classes
    base = getattr(module.hf, prefix + _BASE, None)
    return found if base is None else {prefix + _BASE: base, **found}


def names(model_type: str) -> list[str]:
    """Return the public names of an architecture."""
    return sorted(exports(model_type))


def model_classes(model_type: str) -> dict[str, type]:
    """Return the model classes of an architecture by name, without their transformers base."""
    from transformers import PreTrainedModel

    return {
        name: value
        for name, value in sorted(exports(model_type).items())
        if isinstance(value, type) and issubclass(value, PreTrainedModel) and not name.endswith(_BASE)
    }


ADDING = 'docs/develop/architecture.md ("Adding an architecture") says how another one is added'
"""Last words of messages about architectures that the zoo lacks."""


def find(name: str, others: Iterable[str] = ()) -> object:
    """Return the object that the zoo exports as ``name``.

    Args:
        others: further names that the message may propose.

    Raises:
        AttributeError: the zoo has no such object. The message contains the nearest name, the list of architectures, or
            the release of transformers that has it.
    """
    fitting = [kind for kind, prefix in ARCHITECTURES.items() if name.startswith(prefix)]
    for model_type in sorted(fitting, key=lambda kind: -len(ARCHITECTURES[kind])):
        if name in (exported := exports(model_type)):
            return exported[name]
    if newer := [kind for kind, prefix in NEWER.items() if name.startswith(prefix)]:
        raise AttributeError(f"oslo_models cannot import {name}: {needed_release(newer[0])}")
    hint = did_you_mean(name, [*_names_near(name), *others]) or f"; architectures: {', '.join(ARCHITECTURES)}."
    raise AttributeError(f"oslo_models has no {name}{hint} `oslo-models list` shows all classes, and {ADDING}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean ...?"`` with the nearest of ``known``, ignoring case, or "" if no name is near."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
    return f"; did you mean {by_lower[found[0]]}?" if found else ""


def _names_near(name: str) -> list[str]:
    """Return the public names of the few architectures with a prefix similar to the beginning of ``name``.

    Importing all architectures would take seconds.
    """
    likeness = {
        kind: difflib.SequenceMatcher(None, prefix.lower(), name[: len(prefix)].lower()).ratio()
        for kind, prefix in ARCHITECTURES.items()
    }
    likely = sorted((kind for kind in likeness if likeness[kind] >= 0.7), key=lambda kind: -likeness[kind])
    return [each for kind in likely[:4] for each in names(kind)]
