"""Names of the arguments of models with images and sounds."""

IMAGES = (
    *("pixel_values", "image_sizes", "image_grid_thw", "mm_token_type_ids", "moe_mm_token_type_ids"),
    *("pixel_attention_mask", "pixel_values_videos", "video_grid_thw", "image_position_ids"),
    *("aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask"),
    *("spatial_shapes", "pixel_mask", "high_res_pixel_values", "image_merge_sizes"),
    *("qformer_input_ids", "qformer_attention_mask", "target_sizes", "pixel_values_local", "num_local_patches"),
    *("bbox", "flattened_patches", "image_attention_mask", "image_embeds_position_mask", "image_pixel_values"),
    *("image_token_pooling", "image_grids"),
)
"""Arguments with images and videos, or about them."""
SOUNDS = (
    *("input_features", "feature_attention_mask", "input_features_mask", "input_values", "padding_mask"),
    *("audio_input_features", "audio_embed_sizes", "audio_attention_mask", "audio_input_ids", "audio_input_ids_mask"),
)
"""Arguments with sounds, or about them, of models with a decoder of text."""
