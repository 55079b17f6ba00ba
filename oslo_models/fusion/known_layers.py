"""Tables of transformers layers that are copies of each other.

transformers repeats the code of a layer in every model that uses it. Each table lists, as ``model.Class``, the layers
with a copy of the ``forward`` of the named class. A layer stays unfused if its source differs from the checked releases
(`oslo_models.contracts`). tests/fusion/test_fusion_tables.py fails when a copy is missing here, on a release with all
model types of the registry.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from torch import nn

from oslo_models import registry
from oslo_models.contracts import changed_layer
from oslo_models.contracts.listing import LAYERS


def layer_name(module: nn.Module) -> str:
    """Return the transformers class that defines a layer's ``forward``, such as ``"llama.LlamaRMSNorm"``.

    Returns:
        ``""`` for other layers, and for layers of the tables that differ from the checked releases.
    """
    return layer_name_of(type(module).__mro__)


def layer_name_of(classes: Iterable[type]) -> str:
    """Return `layer_name` of the first of these classes that defines a ``forward``."""
    name, cls = _defining(tuple(classes))
    return "" if changed_layer(_kinds().get(name, ()), name, cls.__dict__["forward"]) else name


def changed_kind(classes: Iterable[type]) -> tuple[str, str] | None:
    """Return the operation of a layer and its difference from the checked releases, or ``None`` if there is none."""
    name, cls = _defining(tuple(classes))
    kinds = _kinds().get(name, ())
    changed = changed_layer(kinds, name, cls.__dict__["forward"])
    return None if changed is None else (LAYERS[kinds[0]].operation, changed)


@cache
def _defining(classes: tuple[type, ...]) -> tuple[str, type]:
    """Return the first of these classes that defines a ``forward``, and its name if it is a layer of transformers."""
    defining = next(cls for cls in classes if "forward" in cls.__dict__)
    package, _, model = defining.__module__.rpartition(".")[0].rpartition(".")
    return f"{model}.{defining.__name__}" if package == "transformers.models" else "", defining


@cache
def _kinds() -> dict[str, tuple[str, ...]]:
    """Return the kinds of `oslo_models.contracts.listing.LAYERS` for each layer of the tables."""
    members: dict[str, Iterable[str]] = {kind: (kind,) for kind in LAYERS if "." in kind}
    members |= {kind: globals()[kind] for kind in LAYERS if "." not in kind} | ROTARY_ATTENTIONS
    full = frozenset().union(*ROTARY_ATTENTIONS.values()) | {"gpt2.GPT2Attention"}
    members["CALL_EAGER_ATTENTION"] = CALL_EAGER_ATTENTION - full  # contracts cover the full forwards of the others
    found: dict[str, tuple[str, ...]] = {}
    for kind, layers in members.items():
        for layer in layers:
            found[layer] = (*found.get(layer, ()), kind)
    return found


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Norms ----------------------------------------------------------------------------------------------------------------

RMS_NORMS = _names("""
    apertus.ApertusRMSNorm apertus1p5.Apertus1p5TextRMSNorm arcee.ArceeRMSNorm aria.AriaTextRMSNorm axk1.AXK1RMSNorm
    axk2.AXK2RMSNorm
    bailing_hybrid.BailingHybridRMSNorm bamba.BambaRMSNorm bitnet.BitNetRMSNorm blt.BltRMSNorm
    cohere2_moe.Cohere2MoeRMSNorm cwm.CwmRMSNorm deepseek_v2.DeepseekV2RMSNorm deepseek_v3.DeepseekV3RMSNorm
    deepseek_v32.DeepseekV32RMSNorm diffllama.DiffLlamaRMSNorm doge.DogeRMSNorm dots1.Dots1RMSNorm
    dots3_note.Dots3NoteRMSNorm ernie4_5.Ernie4_5RMSNorm ernie4_5_moe.Ernie4_5_MoeRMSNorm exaone4.Exaone4RMSNorm
    exaone_moe.ExaoneMoeRMSNorm falcon_h1.FalconH1RMSNorm falcon_mamba.FalconMambaRMSNorm glm.GlmRMSNorm
    glm4.Glm4RMSNorm glm4_moe.Glm4MoeRMSNorm glm4_moe_lite.Glm4MoeLiteRMSNorm glm_moe_dsa.GlmMoeDsaRMSNorm
    granite.GraniteRMSNorm granite_swa.GraniteSWARMSNorm granitemoe.GraniteMoeRMSNorm
    granitemoe_swa.GraniteMoeSWARMSNorm granitemoehybrid.GraniteMoeHybridRMSNorm
    granitemoeshared.GraniteMoeSharedRMSNorm hunyuan_v1_dense.HunYuanDenseV1RMSNorm hunyuan_v1_moe.HunYuanMoEV1RMSNorm
    hy_v3.HYV3RMSNorm hy_v4.HYV4RMSNorm hy_v4_vl.HYV4VLRMSNorm hyperclovax.HyperCLOVAXRMSNorm inkling.InklingRMSNorm
    jamba.JambaRMSNorm
    jetmoe.JetMoeRMSNorm
    kimi_linear.KimiLinearRMSNorm kolibri1.Kolibri1RMSNorm laguna.LagunaRMSNorm lfm2.Lfm2RMSNorm lfm2_moe.Lfm2MoeRMSNorm
    lfm3.Lfm3RMSNorm llama.LlamaRMSNorm longcat_flash.LongcatFlashRMSNorm mamba.MambaRMSNorm mamba2.Mamba2RMSNorm
    mellum.MellumRMSNorm mimo_v2_flash.MiMoV2FlashRMSNorm minicpm3.MiniCPM3RMSNorm minimax.MiniMaxRMSNorm
    minimax_m2.MiniMaxM2RMSNorm ministral.MinistralRMSNorm ministral3.Ministral3RMSNorm mistral.MistralRMSNorm
    mixtral.MixtralRMSNorm olmoe.OlmoeRMSNorm phi3.Phi3RMSNorm qwen2.Qwen2RMSNorm qwen2_moe.Qwen2MoeRMSNorm
    qwen3.Qwen3RMSNorm qwen3_moe.Qwen3MoeRMSNorm seed_oss.SeedOssRMSNorm smollm3.SmolLM3RMSNorm
    solar_open.SolarOpenRMSNorm switch_transformers.SwitchTransformersLayerNorm t5.T5LayerNorm youtu.YoutuRMSNorm
    zamba.ZambaRMSNorm zamba2.Zamba2RMSNorm zaya.ZayaRMSNorm
    idefics3.Idefics3RMSNorm internvl.InternVLVisionRMSNorm lighton_ocr.LightOnOcrRMSNorm mistral3.Mistral3RMSNorm
    pixtral.PixtralRMSNorm
    qwen2_5_vl.Qwen2_5_VLRMSNorm qwen2_vl.Qwen2VLRMSNorm qwen3_vl.Qwen3VLTextRMSNorm qwen3_vl_moe.Qwen3VLMoeTextRMSNorm
    glm4v.Glm4vRMSNorm glm4v_moe.Glm4vMoeRMSNorm glm4v_moe.Glm4vMoeTextRMSNorm glm_ocr.GlmOcrRMSNorm
    mllama.MllamaTextRMSNorm paddleocr_vl.PaddleOCRRMSNorm
    cosmos3_edge.Cosmos3EdgeTextRMSNorm deepseek_ocr2.DeepseekOcr2TextRMSNorm deepseek_ocr2.DeepseekOcr2VisionRMSNorm
    emu3.Emu3RMSNorm exaone4_5.Exaone4_5_RMSNorm granite4_vision.Granite4VisionTextRMSNorm
    granite_docling.GraniteDoclingTextRMSNorm hunyuan_vl.HunYuanVLRMSNorm idefics2.Idefics2RMSNorm
    lfm3_vl.Lfm3VlVisionRMSNorm mistral4.Mistral4RMSNorm ovis2.Ovis2RMSNorm pix2struct.Pix2StructLayerNorm
    chameleon.ChameleonRMSNorm qianfan_ocr.QianfanOCRVisionRMSNorm qwen2_5_omni.Qwen2_5OmniRMSNorm
    ernie4_5_vl_moe.Ernie4_5_VLMoeRMSNorm molmo2.Molmo2RMSNorm qwen3_omni_moe.Qwen3OmniMoeCode2WavRMSNorm
    qwen3_omni_moe.Qwen3OmniMoeRMSNorm qwen3_omni_moe.Qwen3OmniMoeTextRMSNorm
    qwen3_omni_moe.Qwen3OmniMoeThinkerTextRMSNorm
    idefics.IdeficsRMSNorm kosmos2_5.Kosmos2_5LayerNorm phi4_multimodal.Phi4MultimodalRMSNorm udop.UdopLayerNorm
    vibevoice_asr.VibeVoiceAsrRMSNorm voxtral_realtime.VoxtralRealtimeRMSNorm
    eurobert.EuroBertRMSNorm longt5.LongT5LayerNorm ultrabert.UltrabertRMSNorm
""")
"""Copies of LlamaRMSNorm, and T5LayerNorm, which computes the same with casts at other places."""
GEMMA_NORMS = _names("""
    gemma.GemmaRMSNorm gemma2.Gemma2RMSNorm gemma3.Gemma3RMSNorm minimax_m3_vl.MiniMaxM3VLRMSNorm qwen3_5.Qwen3_5RMSNorm
    qwen3_5_moe.Qwen3_5MoeRMSNorm qwen3_next.Qwen3NextRMSNorm recurrent_gemma.RecurrentGemmaRMSNorm
    vaultgemma.VaultGemmaRMSNorm
    muse_glimmer.MuseGlimmerTextCenteredRMSNorm step3p7.Step3p7RMSNorm
    t5gemma.T5GemmaRMSNorm
""")
"""Copies of GemmaRMSNorm."""
OLMO2_NORMS = _names("""
    afmoe.AfmoeRMSNorm beam.BeamRMSNorm deepseek_v4.DeepseekV4RMSNorm flex_olmo.FlexOlmoRMSNorm flint.FlintRMSNorm
    gpt_oss.GptOssRMSNorm inkling2.Inkling2RMSNorm inkling2_loop.Inkling2LoopRMSNorm olmo2.Olmo2RMSNorm
    olmo3.Olmo3RMSNorm olmo_hybrid.OlmoHybridRMSNorm
""")
"""Copies of Olmo2RMSNorm."""
if registry.INSTALLED < (5, 20):
    _OF_LLAMA = _names("deepseek_v4.DeepseekV4RMSNorm")
    RMS_NORMS, OLMO2_NORMS = RMS_NORMS | _OF_LLAMA, OLMO2_NORMS - _OF_LLAMA

# MLPs -----------------------------------------------------------------------------------------------------------------

GATED_MLPS = _names("""
    afmoe.AfmoeMLP aria.AriaSharedExpertsMLP axk1.AXK1MLP axk2.AXK2MLP bailing_hybrid.BailingHybridMLP bamba.BambaMLP
    blt.BltMLP cohere.CohereMLP cohere2.Cohere2MLP cohere2_moe.Cohere2MoeMLP cohere_compass.CohereCompassMLP cwm.CwmMLP
    deepseek_v2.DeepseekV2MLP deepseek_v3.DeepseekV3MLP deepseek_v32.DeepseekV32MLP diffllama.DiffLlamaMLP doge.DogeMLP
    dots1.Dots1MLP dots3_note.Dots3NoteTextMLP dots3_note.Dots3NoteVisionMLP ernie4_5.Ernie4_5MLP
    ernie4_5_moe.Ernie4_5_MoeMLP exaone4.Exaone4MLP exaone_moe.ExaoneMoeMLP flex_olmo.FlexOlmoMLP flint.FlintMLP
    gemma.GemmaMLP gemma2.Gemma2MLP gemma3.Gemma3MLP gemma4.Gemma4TextMLP gemma4.Gemma4VisionMLP
    gemma4_unified.Gemma4UnifiedTextMLP glm4_moe.Glm4MoeMLP glm4_moe_lite.Glm4MoeLiteMLP glm_moe_dsa.GlmMoeDsaMLP
    granite.GraniteMLP granite_swa.GraniteSWAMLP helium.HeliumMLP hrm_text.HrmTextMLP hunyuan_v1_dense.HunYuanDenseV1MLP
    hunyuan_v1_moe.HunYuanMoEV1MLP hy_v3.HYV3MLP hy_v4.HYV4MLP hy_v4_vl.HYV4VLMLP hyperclovax.HyperCLOVAXMLP
    jamba.JambaMLP
    kimi_linear.KimiLinearMLP
    kolibri1.Kolibri1MLP laguna.LagunaMLP lara_mini.LaraMiniMLP llama.LlamaMLP longcat_flash.LongcatFlashMLP
    mellum.MellumMLP
    mimo_v2_flash.MiMoV2FlashMLP minicpm3.MiniCPM3MLP ministral.MinistralMLP ministral3.Ministral3MLP mistral.MistralMLP
    olmo.OlmoMLP olmo2.Olmo2MLP olmo3.Olmo3MLP olmo_hybrid.OlmoHybridMLP olmoe.OlmoeMLP qwen2.Qwen2MLP
    qwen2_moe.Qwen2MoeMLP qwen3.Qwen3MLP qwen3_5.Qwen3_5MLP qwen3_5_moe.Qwen3_5MoeMLP qwen3_moe.Qwen3MoeMLP
    qwen3_next.Qwen3NextMLP qwen4_exp.Qwen4ExpTextMLP smollm3.SmolLM3MLP solar_open.SolarOpenMLP stablelm.StableLmMLP
    vaultgemma.VaultGemmaMLP youtu.YoutuMLP zamba.ZambaMLP
    pixtral.PixtralMLP qwen2_5_vl.Qwen2MLP qwen2_vl.Qwen2MLP qwen3_vl.Qwen3VLTextMLP qwen3_vl_moe.Qwen3VLMoeTextMLP
    dinov2.Dinov2SwiGLUFFN dinov2_with_registers.Dinov2WithRegistersSwiGLUFFN glm4v_moe.Glm4vMoeTextMLP
    dinov3_vit.DINOv3ViTGatedMLP mllama.MllamaTextMLP paddleocr_vl.PaddleOCRMLP
    deepseek_ocr2.DeepseekOcr2TextMLP deepseek_ocr2.DeepseekOcr2VisionMLP emu3.Emu3MLP
    granite4_vision.Granite4VisionTextMLP granite_docling.GraniteDoclingTextMLP hunyuan_vl.HunYuanVLMLP
    chameleon.ChameleonMLP mistral4.Mistral4MLP muse_glimmer.MuseGlimmerTextMLP ovis2.Ovis2MLP ovis2.Ovis2VisionMLP
    ernie4_5_vl_moe.Ernie4_5_VLMoeMLP molmo2.Molmo2ImageProjectorMLP molmo2.Molmo2MLP
    qwen3_omni_moe.Qwen3OmniMoeCode2WavMlp qwen3_omni_moe.Qwen3OmniMoeMLP
    qwen3_omni_moe.Qwen3OmniMoeTalkerTextMLP qwen3_omni_moe.Qwen3OmniMoeThinkerTextMLP
    voxtral_realtime.VoxtralRealtimeMLP voxtral_realtime.VoxtralRealtimeTextMLP
    eurobert.EuroBertMLP nomic_bert.NomicBertMLP esmc.EsmcMLP ultrabert.UltrabertMLP
""")
"""Copies of LlamaMLP: ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""
PACKED_MLPS = _names("""
    dots3_note.Dots3NoteAudioMLP glm.GlmMLP glm4.Glm4MLP phi3.Phi3MLP
    glm4v.Glm4vTextMLP glm_ocr.GlmOcrTextMLP phi4_multimodal.Phi4MultimodalMLP
""")
"""Copies of Phi3MLP, with gate and up projection in one matrix."""
NEOX_MLPS = _names("""
    gpt_neox.GPTNeoXMLP persimmon.PersimmonMLP
""")
"""Copies of GPTNeoXMLP."""
GPT2_MLPS = _names("""
    gpt2.GPT2MLP gpt_bigcode.GPTBigCodeMLP gpt_neo.GPTNeoMLP imagegpt.ImageGPTMLP
""")
"""Copies of GPT2MLP."""
GPTJ_MLPS = _names("""
    codegen.CodeGenMLP gptj.GPTJMLP
""")
"""Copies of GPTJMLP."""
BERT_INTERMEDIATES = _names("""
    bert.BertIntermediate bert_generation.BertGenerationIntermediate big_bird.BigBirdIntermediate
    camembert.CamembertIntermediate convbert.ConvBertIntermediate cpmant.CpmAntIntermediate
    data2vec.Data2VecTextIntermediate deberta.DebertaIntermediate deberta_v2.DebertaV2Intermediate
    electra.ElectraIntermediate ernie.ErnieIntermediate layoutlm.LayoutLMIntermediate longformer.LongformerIntermediate
    luke.LukeIntermediate lxmert.LxmertIntermediate megatron_bert.MegatronBertIntermediate
    mobilebert.MobileBertIntermediate mpnet.MPNetIntermediate rembert.RemBertIntermediate roberta.RobertaIntermediate
    roc_bert.RoCBertIntermediate roformer.RoFormerIntermediate tapas.TapasIntermediate
    visual_bert.VisualBertIntermediate xlm_roberta.XLMRobertaIntermediate xlm_roberta_xl.XLMRobertaXLIntermediate
    xmod.XmodIntermediate
    data2vec.Data2VecVisionIntermediate dpt.DPTViTIntermediate swinv2.Swinv2Intermediate videomae.VideoMAEIntermediate
    yolos.YolosIntermediate
    mobilevit.MobileViTIntermediate sew_d.SEWDIntermediate
    blip_2.Blip2QFormerIntermediate donut.DonutSwinIntermediate git.GitIntermediate
    instructblip.InstructBlipQFormerIntermediate instructblipvideo.InstructBlipVideoQFormerIntermediate
    canine.CanineIntermediate layoutlmv3.LayoutLMv3Intermediate lilt.LiltIntermediate markuplm.MarkupLMIntermediate
    fnet.FNetIntermediate
""")
"""Copies of BertIntermediate: a linear layer and its activation."""

# Blocks and residuals -------------------------------------------------------------------------------------------------

LLAMA_BLOCKS = _names("""
    arcee.ArceeDecoderLayer aria.AriaTextDecoderLayer axk1.AXK1DecoderLayer axk2.AXK2DecoderLayer
    bitnet.BitNetDecoderLayer cwm.CwmDecoderLayer deepseek_v2.DeepseekV2DecoderLayer deepseek_v3.DeepseekV3DecoderLayer
    deepseek_v32.DeepseekV32DecoderLayer diffllama.DiffLlamaDecoderLayer dots1.Dots1DecoderLayer
    dots3_note.Dots3NoteTextDecoderLayer ernie4_5.Ernie4_5DecoderLayer ernie4_5_moe.Ernie4_5_MoeDecoderLayer
    exaone_moe.ExaoneMoeDecoderLayer flint.FlintDecoderLayer gemma.GemmaDecoderLayer glm.GlmDecoderLayer
    glm4_moe.Glm4MoeDecoderLayer glm4_moe_lite.Glm4MoeLiteDecoderLayer helium.HeliumDecoderLayer
    hrm_text.HrmTextDecoderLayer hunyuan_v1_dense.HunYuanDenseV1DecoderLayer hunyuan_v1_moe.HunYuanMoEV1DecoderLayer
    hy_v3.HYV3DecoderLayer jais2.Jais2DecoderLayer laguna.LagunaDecoderLayer llama.LlamaDecoderLayer
    mellum.MellumDecoderLayer mimo_v2_flash.MiMoV2FlashDecoderLayer ministral.MinistralDecoderLayer
    ministral3.Ministral3DecoderLayer mistral.MistralDecoderLayer nanochat.NanoChatDecoderLayer olmo.OlmoDecoderLayer
    olmoe.OlmoeDecoderLayer qwen2.Qwen2DecoderLayer qwen2_moe.Qwen2MoeDecoderLayer qwen3.Qwen3DecoderLayer
    qwen3_moe.Qwen3MoeDecoderLayer qwen3_vl_moe.Qwen3VLMoeTextDecoderLayer seed_oss.SeedOssDecoderLayer
    smollm3.SmolLM3DecoderLayer
    solar_open.SolarOpenDecoderLayer starcoder2.Starcoder2DecoderLayer youtu.YoutuDecoderLayer
    qwen2_5_omni.Qwen2_5OmniDecoderLayer qwen2_5_vl.Qwen2_5_VLDecoderLayer qwen2_vl.Qwen2VLDecoderLayer
    qwen3_omni_moe.Qwen3OmniMoeTalkerCodePredictorDecoderLayer qwen3_omni_moe.Qwen3OmniMoeTalkerDecoderLayer
    qwen3_omni_moe.Qwen3OmniMoeThinkerTextDecoderLayer
    glm4v_moe.Glm4vMoeTextDecoderLayer
    paddleocr_vl.PaddleOCRDecoderLayer
    moonshine.MoonshineEncoderLayer
    cosmos3_edge.Cosmos3EdgeTextDecoderLayer deepseek_ocr2.DeepseekOcr2TextDecoderLayer
    deepseek_ocr2.DeepseekOcr2VisionEncoderLayer hunyuan_vl.HunYuanVLDenseV1DecoderLayer mistral4.Mistral4DecoderLayer
    step3p7.Step3p7DecoderLayer
    eurobert.EuroBertDecoderLayer ultrabert.UltrabertDecoderLayer
""")
"""Copies of LlamaDecoderLayer."""
PHI3_BLOCKS = _names("""
    dots3_note.Dots3NoteAudioLayer phi3.Phi3DecoderLayer phi4_multimodal.Phi4MultimodalDecoderLayer
""")
"""Copies of Phi3DecoderLayer, which has dropout before its residuals."""
GEMMA2_BLOCKS = _names("""
    gemma2.Gemma2DecoderLayer gemma3.Gemma3DecoderLayer
    muse_glimmer.MuseGlimmerTextDecoderLayer
""")
"""Copies of Gemma2DecoderLayer."""
OLMO2_BLOCKS = _names("""
    exaone4.Exaone4DecoderLayer flex_olmo.FlexOlmoDecoderLayer olmo2.Olmo2DecoderLayer olmo3.Olmo3DecoderLayer
    olmo_hybrid.OlmoHybridAttentionDecoderLayer
    exaone4_5.Exaone4_5_DecoderLayer
""")
"""Copies of Olmo2DecoderLayer and FlexOlmoDecoderLayer, with norms after attention and MLP."""
NEOX_BLOCKS = _names("""
    gpt_neox.GPTNeoXLayer
""")
"""Copies of GPTNeoXLayer."""
GPTJ_BLOCKS = _names("""
    codegen.CodeGenBlock gptj.GPTJBlock
""")
"""Copies of GPTJBlock, with one norm before both attention and MLP."""
PHI_BLOCKS = _names("""
    phi.PhiDecoderLayer
""")
"""Copies of PhiDecoderLayer, as GPTJBlock with dropout."""
COHERE_BLOCKS = _names("""
    cohere.CohereDecoderLayer
""")
"""Copies of CohereDecoderLayer, as GPTJBlock."""
BERT_OUTPUTS = _names("""
    bert.BertOutput bert.BertSelfOutput bert_generation.BertGenerationOutput bert_generation.BertGenerationSelfOutput
    big_bird.BigBirdOutput big_bird.BigBirdSelfOutput camembert.CamembertOutput camembert.CamembertSelfOutput
    convbert.ConvBertOutput convbert.ConvBertSelfOutput cpmant.CpmAntOutput data2vec.Data2VecTextOutput
    data2vec.Data2VecTextSelfOutput deberta.DebertaOutput deberta.DebertaSelfOutput deberta_v2.DebertaV2Output
    deberta_v2.DebertaV2SelfOutput electra.ElectraOutput electra.ElectraSelfOutput ernie.ErnieOutput
    ernie.ErnieSelfOutput layoutlm.LayoutLMOutput layoutlm.LayoutLMSelfOutput longformer.LongformerOutput
    longformer.LongformerSelfOutput luke.LukeOutput luke.LukeSelfOutput lxmert.LxmertAttentionOutput lxmert.LxmertOutput
    mpnet.MPNetOutput rembert.RemBertOutput rembert.RemBertSelfOutput roberta.RobertaOutput roberta.RobertaSelfOutput
    roc_bert.RoCBertOutput roc_bert.RoCBertSelfOutput roformer.RoFormerOutput roformer.RoFormerSelfOutput
    tapas.TapasOutput tapas.TapasSelfOutput visual_bert.VisualBertOutput visual_bert.VisualBertSelfOutput
    xlm_roberta.XLMRobertaOutput xlm_roberta.XLMRobertaSelfOutput
    sew_d.SEWDOutput sew_d.SEWDSelfOutput
    blip_2.Blip2QFormerOutput blip_2.Blip2QFormerSelfOutput git.GitOutput git.GitSelfOutput
    instructblip.InstructBlipQFormerOutput instructblip.InstructBlipQFormerSelfOutput
    instructblipvideo.InstructBlipVideoQFormerOutput instructblipvideo.InstructBlipVideoQFormerSelfOutput
    canine.CanineOutput canine.CanineSelfOutput layoutlmv3.LayoutLMv3Output layoutlmv3.LayoutLMv3SelfOutput
    lilt.LiltOutput lilt.LiltSelfOutput markuplm.MarkupLMOutput markuplm.MarkupLMSelfOutput fnet.FNetOutput
""")
"""Copies of BertOutput: linear layer, dropout, residual, LayerNorm."""
T5_FEED_FORWARDS = _names("""
    mt5.MT5LayerFF t5.T5LayerFF umt5.UMT5LayerFF
    pix2struct.Pix2StructTextLayerFF udop.UdopLayerFF
    longt5.LongT5LayerFF
""")
"""Copies of T5LayerFF."""

# Attention ------------------------------------------------------------------------------------------------------------

CALL_EAGER_ATTENTION = _names("""
    afmoe.AfmoeAttention albert.AlbertAttention apertus.ApertusAttention apertus1p5.Apertus1p5TextAttention
    arcee.ArceeAttention aria.AriaTextAttention
    axk1.AXK1Attention axk2.AXK2Attention bailing_hybrid.BailingHybridAttention bamba.BambaAttention bart.BartAttention
    beam.BeamAttention bert.BertCrossAttention bert.BertSelfAttention bert_generation.BertGenerationCrossAttention
    bert_generation.BertGenerationSelfAttention biogpt.BioGptAttention bitnet.BitNetAttention
    blenderbot.BlenderbotAttention blenderbot_small.BlenderbotSmallAttention blt.BltCrossAttention blt.BltSelfAttention
    camembert.CamembertCrossAttention camembert.CamembertSelfAttention clip.CLIPAttention cohere.CohereAttention
    cohere2.Cohere2Attention cohere2_moe.Cohere2MoeAttention cohere_compass.CohereCompassAttention
    cohere_compass.CohereCompassVisionAttention ctrl.MultiHeadAttention cwm.CwmAttention
    data2vec.Data2VecAudioAttention data2vec.Data2VecTextCrossAttention data2vec.Data2VecTextSelfAttention
    dbrx.DbrxAttention
    deepseek_v2.DeepseekV2Attention deepseek_v3.DeepseekV3Attention deepseek_v32.DeepseekV32Attention
    detr.DetrCrossAttention detr.DetrSelfAttention diffllama.DiffLlamaAttention distilbert.DistilBertSelfAttention
    doge.DogeAttention dory.DoryAttention dots1.Dots1Attention dots3_note.Dots3NoteAudioAttention
    dots3_note.Dots3NoteTextAttention
    dots3_note.Dots3NoteVisionAttention electra.ElectraCrossAttention electra.ElectraSelfAttention
    ernie.ErnieCrossAttention ernie.ErnieSelfAttention ernie4_5.Ernie4_5Attention ernie4_5_moe.Ernie4_5_MoeAttention
    exaone4.Exaone4Attention exaone_moe.ExaoneMoeAttention falcon_h1.FalconH1Attention flex_olmo.FlexOlmoAttention
    gemma.GemmaAttention gemma2.Gemma2Attention gemma3.Gemma3Attention gemma3n.Gemma3nTextAttention
    gemma4.Gemma4TextAttention gemma4.Gemma4VisionAttention gemma4_unified.Gemma4UnifiedTextAttention glm.GlmAttention
    glm4.Glm4Attention glm4_moe.Glm4MoeAttention glm4_moe_lite.Glm4MoeLiteAttention glm_moe_dsa.GlmMoeDsaAttention
    gpt2.GPT2Attention gpt_bigcode.GPTBigCodeAttention granite.GraniteAttention granitemoe.GraniteMoeAttention
    granitemoehybrid.GraniteMoeHybridAttention granitemoeshared.GraniteMoeSharedAttention helium.HeliumAttention
    hrm_text.HrmTextAttention hubert.HubertAttention hunyuan_v1_dense.HunYuanDenseV1Attention
    hunyuan_v1_moe.HunYuanMoEV1Attention hy_v3.HYV3Attention hyperclovax.HyperCLOVAXAttention jais2.Jais2Attention
    jamba.JambaAttention jetmoe.JetMoeAttention kimi_linear.KimiLinearAttention kolibri1.Kolibri1Attention
    laguna.LagunaAttention lara_mini.LaraMiniAttention lfm2.Lfm2Attention lfm2_moe.Lfm2MoeAttention lfm3.Lfm3Attention
    llama.LlamaAttention
    longcat_flash.LongcatFlashMLA m2m_100.M2M100Attention marian.MarianAttention mbart.MBartAttention
    mellum.MellumAttention minicpm3.MiniCPM3Attention minimax.MiniMaxAttention minimax_m2.MiniMaxM2Attention
    minimax_m3_vl.MiniMaxM3VLAttention minimax_m3_vl.MiniMaxM3VLVisionAttention ministral.MinistralAttention
    ministral3.Ministral3Attention mistral.MistralAttention mixtral.MixtralAttention mobilebert.MobileBertSelfAttention
    mt5.MT5Attention nanochat.NanoChatAttention nemotron.NemotronAttention nemotron_h.NemotronHAttention
    nllb_moe.NllbMoeAttention olmo.OlmoAttention olmo2.Olmo2Attention olmo3.Olmo3Attention
    olmo_hybrid.OlmoHybridAttention olmoe.OlmoeAttention opt.OPTAttention pegasus.PegasusAttention phi.PhiAttention
    phi3.Phi3Attention phimoe.PhimoeAttention plbart.PLBartAttention qwen2.Qwen2Attention qwen2_moe.Qwen2MoeAttention
    qwen3.Qwen3Attention qwen3_5.Qwen3_5Attention qwen3_5.Qwen3_5VisionAttention qwen3_5_moe.Qwen3_5MoeAttention
    qwen3_5_moe.Qwen3_5MoeVisionAttention qwen3_moe.Qwen3MoeAttention qwen3_next.Qwen3NextAttention
    qwen4_exp.Qwen4ExpTextAttention qwen4_exp.Qwen4ExpVisionAttention
    recurrent_gemma.RecurrentGemmaAttention roberta.RobertaCrossAttention roberta.RobertaSelfAttention
    roberta_prelayernorm.RobertaPreLayerNormCrossAttention roberta_prelayernorm.RobertaPreLayerNormSelfAttention
    roc_bert.RoCBertCrossAttention roc_bert.RoCBertSelfAttention seed_oss.SeedOssAttention siglip.SiglipAttention
    smollm3.SmolLM3Attention
    solar_open.SolarOpenAttention speech_to_text.Speech2TextAttention stablelm.StableLmAttention
    starcoder2.Starcoder2Attention switch_transformers.SwitchTransformersAttention t5.T5Attention umt5.UMT5Attention
    unispeech.UniSpeechAttention unispeech_sat.UniSpeechSatAttention
    vaultgemma.VaultGemmaAttention wav2vec2.Wav2Vec2Attention whisper.WhisperAttention
    xlm_roberta.XLMRobertaCrossAttention xlm_roberta.XLMRobertaSelfAttention xlm_roberta_xl.XLMRobertaXLCrossAttention
    xlm_roberta_xl.XLMRobertaXLSelfAttention xmod.XmodCrossAttention xmod.XmodSelfAttention youtu.YoutuAttention
    zamba.ZambaAttention zamba2.Zamba2Attention zaya.ZayaAttention
    idefics3.Idefics3VisionAttention pixtral.PixtralAttention qwen2_5_vl.Qwen2_5_VLAttention
    qwen2_5_vl.Qwen2_5_VLVisionAttention qwen2_vl.Qwen2VLAttention qwen2_vl.VisionAttention
    qwen3_vl.Qwen3VLTextAttention qwen3_vl.Qwen3VLVisionAttention
    qwen3_vl_moe.Qwen3VLMoeTextAttention qwen3_vl_moe.Qwen3VLMoeVisionAttention smolvlm.SmolVLMVisionAttention
    dinov2.Dinov2Attention dinov2_with_registers.Dinov2WithRegistersAttention glm4v.Glm4vTextAttention
    glm4v.Glm4vVisionAttention glm4v_moe.Glm4vMoeTextAttention glm4v_moe.Glm4vMoeVisionAttention
    glm_ocr.GlmOcrTextAttention glm_ocr.GlmOcrVisionAttention sew.SEWAttention wav2vec2_bert.Wav2Vec2BertSelfAttention
    dinov3_vit.DINOv3ViTAttention dpt.DPTSelfAttention mllama.MllamaTextCrossAttention mllama.MllamaTextSelfAttention
    mllama.MllamaVisionAttention paddleocr_vl.PaddleOCRAttention paddleocr_vl.PaddleOCRVisionAttention
    siglip2.Siglip2Attention videomae.VideoMAESelfAttention wav2vec2_conformer.Wav2Vec2ConformerSelfAttention
    yolos.YolosSelfAttention
    conditional_detr.ConditionalDetrDecoderCrossAttention conditional_detr.ConditionalDetrDecoderSelfAttention
    conditional_detr.ConditionalDetrSelfAttention deformable_detr.DeformableDetrSelfAttention owlv2.Owlv2Attention
    owlvit.OwlViTAttention rt_detr.RTDetrSelfAttention rt_detr_v2.RTDetrV2SelfAttention
    seamless_m4t.SeamlessM4TAttention seamless_m4t.SeamlessM4TConformerSelfAttention
    seamless_m4t_v2.SeamlessM4Tv2Attention seamless_m4t_v2.SeamlessM4Tv2ConformerSelfAttention
    audioflamingo3.AudioFlamingo3Attention canary.CanaryCrossAttention canary.CanarySelfAttention
    cohere_asr.CohereAsrCrossAttention cohere_asr.CohereAsrSelfAttention fun_asr_nano.FunAsrNanoAttention
    glmasr.GlmAsrAttention
    granite_speech5.GraniteSpeech5EncoderAttention lasr.LasrEncoderAttention moonshine.MoonshineAttention
    omniasr.OmniASRAttention parakeet.ParakeetEncoderAttention qwen2_audio.Qwen2AudioAttention
    qwen2_5_omni.Qwen2_5OmniAttention qwen2_5_omni.Qwen2_5OmniAudioAttention
    qwen2_5_omni.Qwen2_5OmniVisionAttention qwen3_asr.Qwen3ASRAudioAttention
    ernie4_5_vl_moe.Ernie4_5_VLMoeTextAttention ernie4_5_vl_moe.Ernie4_5_VLMoeVisionAttention
    molmo2.Molmo2Attention molmo2.Molmo2VisionAttention step3p7.Step3p7Attention step3p7.Step3p7VisionAttention
    qwen3_omni_moe.Qwen3OmniMoeAudioAttention qwen3_omni_moe.Qwen3OmniMoeCode2WavAttention
    qwen3_omni_moe.Qwen3OmniMoeTalkerCodePredictorAttention qwen3_omni_moe.Qwen3OmniMoeThinkerTextAttention
    qwen3_omni_moe.Qwen3OmniMoeVisionAttention voxtral.VoxtralAttention
    cosmos3_edge.Cosmos3EdgeTextAttention cosmos3_edge.Cosmos3EdgeVisionAttention
    deepseek_ocr2.DeepseekOcr2TextAttention deepseek_ocr2.DeepseekOcr2VisionAttention emu3.Emu3Attention
    emu3.Emu3VQVAEAttentionBlock exaone4_5.Exaone4_5_Attention exaone4_5.Exaone4_5_VisionAttention
    florence2.Florence2VisionChannelAttention florence2.Florence2VisionWindowAttention git.GitVisionAttention
    granite4_vision.Granite4VisionTextAttention granite_docling.GraniteDoclingTextAttention
    granite_docling.GraniteDoclingVisionAttention hunyuan_vl.HunYuanVLDenseV1Attention
    hunyuan_vl.HunYuanVLVisionAttention janus.JanusVisionAttention lfm3_vl.Lfm3VlVisionAttention
    metaclip_2.MetaClip2Attention minicpm_ocr.MiniCPMOcrVisionAttention minicpmv4_6.MiniCPMV4_6VisionAttention
    minicpmv4_7.MiniCPMV4_7VisionAttention mistral4.Mistral4Attention muse_glimmer.MuseGlimmerTextAttention
    kimi_k25.Kimi_K25VisionAttention
    chameleon.ChameleonAttention moss_transcribe_diarize.MossTranscribeDiarizeAudioAttention
    muse_glimmer.MuseGlimmerVisionAttention ovis2.Ovis2VisionAttention pix2struct.Pix2StructTextAttention
    pix2struct.Pix2StructVisionAttention video_llama_3.VideoLlama3VisionAttention
    idefics.IdeficsAttention phi4_multimodal.Phi4MultimodalAttention pp_formulanet.PPFormulaNetAttention
    udop.UdopAttention
    voxtral_realtime.VoxtralRealtimeAttention voxtral_realtime.VoxtralRealtimeTextAttention
    esm.EsmSelfAttention eurobert.EuroBertAttention gte.GteAttention jina_embeddings_v3.JinaEmbeddingsV3Attention
    layoutlmv3.LayoutLMv3SelfAttention longt5.LongT5Attention nomic_bert.NomicBertAttention
    pegasus_x.PegasusXAttention t5gemma.T5GemmaCrossAttention t5gemma.T5GemmaSelfAttention
    esmc.EsmcAttention ultrabert.UltrabertAttention
""")
"""Attention layers that call ``eager_attention_forward`` as copied from Llama, BERT, GPT-2, OPT, T5 or Gemma 2."""
COMPARE_IMPLEMENTATIONS = _names("""
    axk2.AXK2Attention deepseek_v32.DeepseekV32Attention dots3_note.Dots3NoteTextAttention
    glm_moe_dsa.GlmMoeDsaAttention minimax_m3_vl.MiniMaxM3VLAttention
""")
"""Attention layers that mask the keys rejected by an indexer, but only for implementations that they know by name."""
ROTARY_ATTENTIONS = {
    "exaone4.Exaone4Attention": _names("""
        exaone4.Exaone4Attention exaone_moe.ExaoneMoeAttention kolibri1.Kolibri1Attention
        exaone4_5.Exaone4_5_Attention
    """),
    "gemma2.Gemma2Attention": _names(
        "gemma2.Gemma2Attention vaultgemma.VaultGemmaAttention t5gemma.T5GemmaSelfAttention"
    ),
    "gemma3.Gemma3Attention": _names("gemma3.Gemma3Attention"),
    "gpt_neox.GPTNeoXAttention": _names("gpt_neox.GPTNeoXAttention"),
    "hunyuan_v1_dense.HunYuanDenseV1Attention": _names("""
        hunyuan_v1_dense.HunYuanDenseV1Attention hunyuan_v1_moe.HunYuanMoEV1Attention
    """),
    "llama.LlamaAttention": _names("""
        arcee.ArceeAttention aria.AriaTextAttention bamba.BambaAttention gemma.GemmaAttention granite.GraniteAttention
        granitemoe.GraniteMoeAttention granitemoeshared.GraniteMoeSharedAttention hyperclovax.HyperCLOVAXAttention
        jais2.Jais2Attention llama.LlamaAttention phimoe.PhimoeAttention qwen2_moe.Qwen2MoeAttention
        solar_open.SolarOpenAttention
        cosmos3_edge.Cosmos3EdgeTextAttention deepseek_ocr2.DeepseekOcr2TextAttention emu3.Emu3Attention
        granite4_vision.Granite4VisionTextAttention granite_docling.GraniteDoclingTextAttention
        eurobert.EuroBertAttention
    """),
    "mistral.MistralAttention": _names("""
        minimax.MiniMaxAttention mistral.MistralAttention mixtral.MixtralAttention
        voxtral_realtime.VoxtralRealtimeAttention voxtral_realtime.VoxtralRealtimeTextAttention
    """),
    "olmo2.Olmo2Attention": _names("""
        flex_olmo.FlexOlmoAttention minimax_m2.MiniMaxM2Attention olmo2.Olmo2Attention
    """),
    "olmo3.Olmo3Attention": _names("olmo3.Olmo3Attention"),
    "phi.PhiAttention": _names("phi.PhiAttention"),
    "phi3.Phi3Attention": _names("phi3.Phi3Attention phi4_multimodal.Phi4MultimodalAttention"),
    "qwen2.Qwen2Attention": _names("""
        cwm.CwmAttention ministral.MinistralAttention qwen2.Qwen2Attention
        deepseek_ocr2.DeepseekOcr2VisionAttention
    """),
    "qwen3.Qwen3Attention": _names("""
        dots1.Dots1Attention mellum.MellumAttention qwen3.Qwen3Attention qwen3_moe.Qwen3MoeAttention
        qwen3_omni_moe.Qwen3OmniMoeCode2WavAttention qwen3_omni_moe.Qwen3OmniMoeTalkerCodePredictorAttention
        qwen3_omni_moe.Qwen3OmniMoeThinkerTextAttention
    """),
    "seed_oss.SeedOssAttention": _names("seed_oss.SeedOssAttention"),
    "smollm3.SmolLM3Attention": _names("smollm3.SmolLM3Attention"),
    "stablelm.StableLmAttention": _names("stablelm.StableLmAttention"),
    "starcoder2.Starcoder2Attention": _names("starcoder2.Starcoder2Attention"),
}
"""The copies of each attention layer with a fused forward in `rotary_attention`. All of them call Llama's
``apply_rotary_pos_emb`` or a copy of it."""
ROTARY_LEFT_UNFUSED = _names("""
    afmoe.AfmoeAttention apertus.ApertusAttention apertus1p5.Apertus1p5TextAttention axk1.AXK1Attention axk2.AXK2Indexer
    beam.BeamAttention
    bitnet.BitNetAttention chameleon.ChameleonAttention
    blt.BltSelfAttention cohere_compass.CohereCompassAttention dbrx.DbrxAttention deepseek_v3.DeepseekV3Attention
    deepseek_v32.DeepseekV32Indexer
    diffllama.DiffLlamaAttention doge.DogeAttention dory.DoryAttention falcon.FalconAttention
    falcon.FalconFlashAttention2
    falcon_h1.FalconH1Attention flint.FlintAttention glm4_moe.Glm4MoeAttention glm4_moe_lite.Glm4MoeLiteAttention
    gpt_neox_japanese.GPTNeoXJapaneseAttention granite_swa.GraniteSWAAttention granitemoe_swa.GraniteMoeSWAAttention
    granitemoehybrid.GraniteMoeHybridAttention hrm_text.HrmTextAttention hy_v3.HYV3Attention hy_v4.HYV4Attention
    hy_v4.HYV4Indexer jetmoe.JetMoeAttention
    laguna.LagunaAttention lara_mini.LaraMiniAttention lfm2.Lfm2Attention lfm2_moe.Lfm2MoeAttention lfm3.Lfm3Attention
    mimo_v2_flash.MiMoV2FlashAttention minicpm3.MiniCPM3Attention minimax_m3_vl.MiniMaxM3VLAttention
    minimax_m3_vl.MiniMaxM3VLIndexer ministral3.Ministral3Attention nanochat.NanoChatAttention olmo.OlmoAttention
    olmo_hybrid.OlmoHybridAttention olmoe.OlmoeAttention persimmon.PersimmonAttention qwen3_5.Qwen3_5Attention
    qwen3_5_moe.Qwen3_5MoeAttention qwen3_next.Qwen3NextAttention recurrent_gemma.RecurrentGemmaAttention
    youtu.YoutuAttention zamba2.Zamba2Attention zaya.ZayaAttention
    pixtral.PixtralAttention qwen2_5_vl.Qwen2_5_VLAttention qwen2_vl.Qwen2VLAttention qwen3_vl.Qwen3VLTextAttention
    qwen3_vl_moe.Qwen3VLMoeTextAttention
    glm4v_moe.Glm4vMoeTextAttention
    mllama.MllamaTextSelfAttention paddleocr_vl.PaddleOCRAttention
    lasr.LasrEncoderAttention
    mistral4.Mistral4Attention muse_glimmer.MuseGlimmerTextAttention
    molmo2.Molmo2Attention qwen2_5_omni.DiTAttention qwen2_5_omni.Qwen2_5OmniAttention step3p7.Step3p7Attention
    idefics.IdeficsAttention
    esmc.EsmcAttention gte.GteAttention jina_embeddings_v3.JinaEmbeddingsV3Attention nomic_bert.NomicBertAttention
    ultrabert.UltrabertAttention
""")
"""Other attention layers that call it. Their forwards differ from Llama's in more than the positions."""
