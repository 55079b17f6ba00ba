"""Which layers of transformers are copies of each other.

transformers repeats the code of a layer in every model that uses it. Each table lists, as ``model.Class``, the layers
whose ``forward`` is a copy of that of the named class. tests/test_fusion_tables.py compares them with the installed
transformers and fails when a release changes a copy or adds one.
"""

from __future__ import annotations

from torch import nn


def layer_name(module: nn.Module) -> str:
    """The transformers class whose forward a layer has, such as ``"llama.LlamaRMSNorm"``; ``""`` for other layers."""
    defining = next(cls for cls in type(module).__mro__ if "forward" in cls.__dict__)
    package, _, model = defining.__module__.rpartition(".")[0].rpartition(".")
    return f"{model}.{defining.__name__}" if package == "transformers.models" else ""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Norms ----------------------------------------------------------------------------------------------------------------

RMS_NORMS = _names("""
    arcee.ArceeRMSNorm cwm.CwmRMSNorm ernie4_5.Ernie4_5RMSNorm exaone4.Exaone4RMSNorm glm.GlmRMSNorm
    glm4.Glm4RMSNorm granite.GraniteRMSNorm hunyuan_v1_dense.HunYuanDenseV1RMSNorm llama.LlamaRMSNorm
    ministral.MinistralRMSNorm mistral.MistralRMSNorm phi3.Phi3RMSNorm qwen2.Qwen2RMSNorm qwen3.Qwen3RMSNorm
    seed_oss.SeedOssRMSNorm smollm3.SmolLM3RMSNorm t5.T5LayerNorm
""")
"""Copies of LlamaRMSNorm, and T5LayerNorm, which computes the same and casts elsewhere."""

# MLPs -----------------------------------------------------------------------------------------------------------------

GATED_MLPS = _names("""
    cohere.CohereMLP cohere2.Cohere2MLP cwm.CwmMLP ernie4_5.Ernie4_5MLP exaone4.Exaone4MLP gemma.GemmaMLP
    gemma2.Gemma2MLP gemma3.Gemma3MLP granite.GraniteMLP helium.HeliumMLP hunyuan_v1_dense.HunYuanDenseV1MLP
    llama.LlamaMLP ministral.MinistralMLP mistral.MistralMLP olmo.OlmoMLP olmo2.Olmo2MLP olmo3.Olmo3MLP
    qwen2.Qwen2MLP qwen3.Qwen3MLP smollm3.SmolLM3MLP stablelm.StableLmMLP vaultgemma.VaultGemmaMLP
""")
"""Copies of LlamaMLP: ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""
GPT2_MLPS = _names("""
    gpt2.GPT2MLP gpt_bigcode.GPTBigCodeMLP gpt_neo.GPTNeoMLP
""")
"""Copies of GPT2MLP."""
GPTJ_MLPS = _names("""
    codegen.CodeGenMLP gptj.GPTJMLP
""")
"""Copies of GPTJMLP."""
BERT_INTERMEDIATES = _names("""
    bert.BertIntermediate bert_generation.BertGenerationIntermediate big_bird.BigBirdIntermediate
    camembert.CamembertIntermediate convbert.ConvBertIntermediate deberta.DebertaIntermediate
    deberta_v2.DebertaV2Intermediate electra.ElectraIntermediate layoutlm.LayoutLMIntermediate
    longformer.LongformerIntermediate luke.LukeIntermediate lxmert.LxmertIntermediate
    megatron_bert.MegatronBertIntermediate mobilebert.MobileBertIntermediate mpnet.MPNetIntermediate
    roberta.RobertaIntermediate roformer.RoFormerIntermediate tapas.TapasIntermediate
    visual_bert.VisualBertIntermediate xlm_roberta.XLMRobertaIntermediate
""")
"""Copies of BertIntermediate: a linear layer and its activation."""

# Blocks and residuals -------------------------------------------------------------------------------------------------

LLAMA_BLOCKS = _names("""
    arcee.ArceeDecoderLayer cwm.CwmDecoderLayer ernie4_5.Ernie4_5DecoderLayer gemma.GemmaDecoderLayer
    glm.GlmDecoderLayer helium.HeliumDecoderLayer hunyuan_v1_dense.HunYuanDenseV1DecoderLayer
    llama.LlamaDecoderLayer ministral.MinistralDecoderLayer mistral.MistralDecoderLayer olmo.OlmoDecoderLayer
    qwen2.Qwen2DecoderLayer qwen3.Qwen3DecoderLayer seed_oss.SeedOssDecoderLayer smollm3.SmolLM3DecoderLayer
    starcoder2.Starcoder2DecoderLayer
""")
"""Copies of LlamaDecoderLayer."""
BERT_OUTPUTS = _names("""
    bert.BertOutput bert.BertSelfOutput bert_generation.BertGenerationOutput
    bert_generation.BertGenerationSelfOutput big_bird.BigBirdOutput big_bird.BigBirdSelfOutput
    camembert.CamembertOutput camembert.CamembertSelfOutput convbert.ConvBertOutput convbert.ConvBertSelfOutput
    deberta.DebertaOutput deberta.DebertaSelfOutput deberta_v2.DebertaV2Output deberta_v2.DebertaV2SelfOutput
    electra.ElectraOutput electra.ElectraSelfOutput layoutlm.LayoutLMOutput layoutlm.LayoutLMSelfOutput
    longformer.LongformerOutput longformer.LongformerSelfOutput luke.LukeOutput luke.LukeSelfOutput
    lxmert.LxmertAttentionOutput lxmert.LxmertOutput mpnet.MPNetOutput roberta.RobertaOutput
    roberta.RobertaSelfOutput roformer.RoFormerOutput roformer.RoFormerSelfOutput tapas.TapasOutput
    tapas.TapasSelfOutput visual_bert.VisualBertOutput visual_bert.VisualBertSelfOutput xlm_roberta.XLMRobertaOutput
    xlm_roberta.XLMRobertaSelfOutput
""")
"""Copies of BertOutput: linear layer, dropout, residual, LayerNorm."""
T5_FEED_FORWARDS = _names("""
    mt5.MT5LayerFF t5.T5LayerFF umt5.UMT5LayerFF
""")
"""Copies of T5LayerFF."""

# Attention ------------------------------------------------------------------------------------------------------------

CALL_EAGER_ATTENTION = _names("""
    albert.AlbertAttention arcee.ArceeAttention bart.BartAttention bert.BertCrossAttention bert.BertSelfAttention
    bert_generation.BertGenerationCrossAttention bert_generation.BertGenerationSelfAttention
    blenderbot.BlenderbotAttention blenderbot_small.BlenderbotSmallAttention camembert.CamembertCrossAttention
    camembert.CamembertSelfAttention clip.CLIPAttention cohere.CohereAttention cohere2.Cohere2Attention
    ctrl.MultiHeadAttention cwm.CwmAttention detr.DetrCrossAttention detr.DetrSelfAttention
    distilbert.DistilBertSelfAttention electra.ElectraCrossAttention electra.ElectraSelfAttention
    ernie4_5.Ernie4_5Attention exaone4.Exaone4Attention gemma.GemmaAttention gemma2.Gemma2Attention
    gemma3.Gemma3Attention glm.GlmAttention glm4.Glm4Attention
    gpt2.GPT2Attention gpt_bigcode.GPTBigCodeAttention granite.GraniteAttention helium.HeliumAttention
    hubert.HubertAttention hunyuan_v1_dense.HunYuanDenseV1Attention llama.LlamaAttention m2m_100.M2M100Attention
    marian.MarianAttention mbart.MBartAttention ministral.MinistralAttention mistral.MistralAttention
    mobilebert.MobileBertSelfAttention mt5.MT5Attention nemotron.NemotronAttention olmo.OlmoAttention
    olmo2.Olmo2Attention olmo3.Olmo3Attention opt.OPTAttention pegasus.PegasusAttention phi.PhiAttention
    phi3.Phi3Attention plbart.PLBartAttention qwen2.Qwen2Attention qwen3.Qwen3Attention
    roberta.RobertaCrossAttention roberta.RobertaSelfAttention seed_oss.SeedOssAttention smollm3.SmolLM3Attention
    speech_to_text.Speech2TextAttention stablelm.StableLmAttention starcoder2.Starcoder2Attention t5.T5Attention
    umt5.UMT5Attention vaultgemma.VaultGemmaAttention wav2vec2.Wav2Vec2Attention whisper.WhisperAttention
    xlm_roberta.XLMRobertaCrossAttention
    xlm_roberta.XLMRobertaSelfAttention
""")
"""Attention layers that call ``eager_attention_forward``, a copy of that of Llama, BERT, GPT-2, OPT, T5
or Gemma 2."""
ROTARY_ATTENTIONS = {
    "exaone4.Exaone4Attention": _names("exaone4.Exaone4Attention"),
    "gemma2.Gemma2Attention": _names("gemma2.Gemma2Attention vaultgemma.VaultGemmaAttention"),
    "gemma3.Gemma3Attention": _names("gemma3.Gemma3Attention"),
    "hunyuan_v1_dense.HunYuanDenseV1Attention": _names("hunyuan_v1_dense.HunYuanDenseV1Attention"),
    "llama.LlamaAttention": _names("""
        arcee.ArceeAttention gemma.GemmaAttention granite.GraniteAttention llama.LlamaAttention
    """),
    "mistral.MistralAttention": _names("mistral.MistralAttention"),
    "phi.PhiAttention": _names("phi.PhiAttention"),
    "qwen2.Qwen2Attention": _names("cwm.CwmAttention ministral.MinistralAttention qwen2.Qwen2Attention"),
    "qwen3.Qwen3Attention": _names("qwen3.Qwen3Attention"),
    "seed_oss.SeedOssAttention": _names("seed_oss.SeedOssAttention"),
    "smollm3.SmolLM3Attention": _names("smollm3.SmolLM3Attention"),
    "stablelm.StableLmAttention": _names("stablelm.StableLmAttention"),
    "starcoder2.Starcoder2Attention": _names("starcoder2.Starcoder2Attention"),
}
"""The copies of each attention layer that `attention` has a fused forward for; all of them call Llama's
``apply_rotary_pos_emb``, or a copy of it."""
ROTARY_LEFT_UNFUSED = _names("falcon.FalconAttention falcon.FalconFlashAttention2")
"""Other attention layers that call it, in forwards that differ from Llama's in more than their positions."""
