"""Video-LLaVA: a tower for images, a tower for the frames of videos, one projector and a decoder."""

from transformers import VideoLlavaConfig
from transformers.models.video_llava import modeling_video_llava as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class VideoLlavaParallel(LlavaParallel):
    """Sharding plan of the Video-LLaVA family."""

    towers = {"image_tower": "vision_config", "video_tower": "vision_config"}


class VideoLlavaModel(VideoLlavaParallel, hf.VideoLlavaModel):
    pass


class VideoLlavaForConditionalGeneration(VideoLlavaParallel, hf.VideoLlavaForConditionalGeneration):
    head_plan = LM_HEAD
