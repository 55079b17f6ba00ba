"""Images and videos of a batch, by row."""

from __future__ import annotations

import random
from itertools import combinations_with_replacement, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from oslo_models.media.division import TowerCall, divide_by_work
from oslo_models.media.items import KINDS, divide_media, items_of_rows
from oslo_models.media.sounds import tokens_of_sounds

IMAGE, VIDEO, SOUND, *_ = KINDS
TOWER = SimpleNamespace(spatial_merge_size=2, patch_size=4)
CONFIG = SimpleNamespace(image_token_id=7, video_token_id=8, vision_config=TOWER)


def ids(rows: list[list[int]], token: int = 7) -> Tensor:
    """Return rows of tokens with a run of placeholders for each image."""
    filled = [[token_id for run in runs for token_id in (1, *[token] * run, 2)] for runs in rows]
    length = max(map(len, filled), default=0)
    return torch.tensor([[0] * (length - len(row)) + row for row in filled])


def by_patch(rng: random.Random) -> tuple[dict[str, Any], list[list[int]]]:
    grids = [[[rng.choice((1, 2)), 2 * rng.randint(1, 3), 2] for _ in range(rng.randint(0, 3))] for _ in range(4)]
    flat = [grid for row in grids for grid in row] or [[1, 2, 2]]
    grids = grids if any(grids) else [[[1, 2, 2]], [], [], []]
    patches = [t * h * w for t, h, w in flat]
    values = torch.cat([torch.full((count, 5), float(i)) for i, count in enumerate(patches)])
    rows = ids([[t * h * w // 4 for t, h, w in row] for row in grids])
    numbers = iter(range(len(flat)))
    owners = [[next(numbers) for _ in row] for row in grids]
    return {"input_ids": rows, "pixel_values": values, "image_grid_thw": torch.tensor(flat)}, owners


@pytest.mark.parametrize("size", [1, 2, 4])
def test_patches_follow_the_rows_of_their_images(size: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        batch, owners = by_patch(rng)
        names, parts = divide_media(batch, 4, size, CONFIG)
        assert set(names) == {"pixel_values", "image_grid_thw"}
        for number, part in enumerate(parts):
            expected = [image for row in owners[number * size : (number + 1) * size] for image in row]
            if not expected:
                assert not part
                continue
            assert part["pixel_values"][:, 0].unique_consecutive().tolist() == expected
            assert int(part["image_grid_thw"].prod(-1).sum()) == len(part["pixel_values"])


def test_images_of_one_size_share_the_placeholders_evenly() -> None:
    batch = {"input_ids": ids([[3], [], [3, 3]]), "pixel_values": torch.randn(3, 3, 8, 8)}
    assert items_of_rows(IMAGE, batch, CONFIG) == [1, 0, 2]
    _, parts = divide_media(batch, 3, 1, CONFIG)
    assert [len(part.get("pixel_values", ())) for part in parts] == [1, 0, 2]


def test_images_of_several_sizes_have_tokens_by_their_sizes() -> None:
    sizes = torch.tensor([[8, 8], [16, 8], [8, 24]])  # 1, 2 and 3 tokens
    batch = {"input_ids": ids([[1, 2], [3]]), "pixel_values": torch.randn(3, 3, 16, 24), "image_sizes": sizes}
    assert items_of_rows(IMAGE, batch, CONFIG) == [2, 1]
    _, parts = divide_media(batch, 2, 1, CONFIG)
    assert [part["image_sizes"].tolist() for part in parts] == [sizes[:2].tolist(), sizes[2:].tolist()]


GRIDS = [[1, 4, 4], [2, 2, 4], [3, 4, 2]]


@pytest.mark.parametrize(
    ("config", "more", "tokens"),
    [
        ({"im_newline_id": 9, "vision_config": {"max_image_size": 8}}, {}, (2 * 3 + 2, 2 * 3 + 2, 3 * 2 * 2 + 2)),
        ({"vision_config": {"max_image_size": 8}}, {}, (2 * 3, 2 * 3, 3 * 2 * 2)),  # without tokens around an image
        ({}, {"image_merge_sizes": torch.tensor([1, 2, 1])}, (16, 4, 24)),
        ({"vision_config": {"model_type": "inkling2_vision"}}, {}, (16, 16, 24)),
    ],
)
def test_images_by_patch_have_tokens_by_their_type(
    config: dict[str, Any], more: dict[str, Tensor], tokens: tuple[int, int, int]
) -> None:
    tower = SimpleNamespace(**{**vars(TOWER), **config.get("vision_config", {})})
    own = SimpleNamespace(**{**vars(CONFIG), **config, "vision_config": tower})
    grids, rows = torch.tensor(GRIDS), ids([[tokens[0]], [], [*tokens[1:]]])
    batch = {"input_ids": rows, "pixel_values": torch.randn(int(grids.prod(-1).sum()), 5), "image_grid_thw": grids}
    assert items_of_rows(IMAGE, {**batch, **more}, own) == [1, 0, 2]
    _, parts = divide_media({**batch, **more}, 3, 1, own)
    assert [len(part.get("pixel_values", ())) for part in parts] == [16, 0, 16 + 24]
    assert [part.keys() - {"pixel_values", "image_grid_thw"} for part in parts] == [{*more}, set(), {*more}]


def test_images_of_codes_have_tokens_by_their_sizes() -> None:
    sizes, own = torch.tensor([[8, 8], [16, 8]]), SimpleNamespace(image_token_id=7)
    own.vision_config = SimpleNamespace(spatial_scale_factor=8)
    batch = {"input_ids": ids([[2], [1]]), "pixel_values": torch.randn(2, 3, 16, 8), "image_sizes": sizes.flip(0)}
    assert items_of_rows(IMAGE, batch, own) == [1, 1]


def test_patches_of_five_dimensions_have_a_token_each() -> None:
    own = SimpleNamespace(image_token_id=7, vision_config=SimpleNamespace(model_type="inkling_vision"))
    batch = {"input_ids": ids([[3], [], [1, 2]]), "pixel_values": torch.randn(6, 2, 4, 4, 3)}
    assert items_of_rows(IMAGE, batch, own) == [3, 0, 3]
    _, parts = divide_media(batch, 3, 1, own)
    assert torch.equal(torch.cat([part["pixel_values"] for part in parts if part]), batch["pixel_values"])


def test_images_with_padded_patches_have_tokens_by_their_shapes() -> None:
    shapes, own = torch.tensor([[4, 4], [2, 8], [4, 2]]), SimpleNamespace(**vars(CONFIG), downsample_factor=2)
    batch = {
        **{"input_ids": ids([[4, 4], [2]]), "pixel_values": torch.randn(3, 16, 5), "spatial_shapes": shapes},
        "pixel_attention_mask": torch.ones(3, 16),
    }
    assert items_of_rows(IMAGE, batch, own) == [2, 1]
    _, parts = divide_media(batch, 2, 1, own)
    assert [part["spatial_shapes"].tolist() for part in parts] == [shapes[:2].tolist(), shapes[2:].tolist()]
    assert [len(part["pixel_attention_mask"]) for part in parts] == [2, 1]


def test_videos_are_divided_beside_images() -> None:
    video, image = torch.randn(8, 5), torch.randn(4, 5)
    batch = {
        "input_ids": torch.cat((ids([[1], []]), ids([[], [2]], 8)), 1),
        **{"pixel_values": image, "image_grid_thw": torch.tensor([[1, 2, 2]])},
        **{"pixel_values_videos": video, "video_grid_thw": torch.tensor([[2, 2, 2]])},
    }
    assert items_of_rows(VIDEO, batch, CONFIG) == [0, 1]
    _, (first, second) = divide_media(batch, 2, 1, CONFIG)
    assert first.keys() == {"pixel_values", "image_grid_thw"}
    assert second.keys() == {"pixel_values_videos", "video_grid_thw"}


def test_images_held_by_row_follow_it_and_models_without_placeholders_are_refused() -> None:
    by_row = {"input_ids": ids([[1], []]), "pixel_values": torch.randn(2, 1, 3, 8, 8)}
    names, (first, second) = divide_media(by_row, 2, 1, CONFIG)
    assert names == ("pixel_values",)
    assert torch.equal(first["pixel_values"], by_row["pixel_values"][:1])
    assert not second
    assert items_of_rows(IMAGE, by_row, CONFIG) is None
    by_image = {"input_ids": ids([[1], [1]]), "pixel_values": torch.randn(2, 3, 8, 8)}
    with pytest.raises(ValueError, match="pixel_values: the configuration has no image_token_id"):
        items_of_rows(IMAGE, by_image, SimpleNamespace())


def hearing(kind: str | None, **sizes: Any) -> Any:
    """Return a configuration with an encoder of sounds of this type; without a type, its masks mark features."""
    encoder = {} if kind is None else {"audio_config": SimpleNamespace(model_type=kind, **sizes)}
    return SimpleNamespace(audio_token_id=9, **encoder)


@pytest.mark.parametrize(
    ("config", "name", "marked", "tokens"),
    [
        (hearing("qwen2_audio_encoder"), "feature_attention_mask", [3000, 1, 0, 7, 8, 9], [750, 0, 0, 2, 2, 2]),
        (hearing("audioflamingo3_encoder"), "input_features_mask", [3000, 2, 3, 4, 5], [750, 0, 1, 1, 1]),
        (hearing("glmasr_encoder"), "input_features_mask", [3000, 6, 7, 14, 15], [375, 0, 1, 1, 2]),
        (
            hearing("qwen3_asr_encoder", n_window=50),
            "input_features_mask",
            [300, 100, 99, 101, 8, 9],
            [39, 13, 13, 14, 1, 2],
        ),
        (hearing("qwen2_5_omni_audio_encoder"), "feature_attention_mask", [3000, 1, 0, 7, 8], [750, 0, 0, 2, 2]),
        (
            hearing("qwen3_omni_moe_audio_encoder", n_window=50),
            "feature_attention_mask",
            [300, 100, 99, 101, 8, 9],
            [39, 13, 13, 14, 1, 2],
        ),
        (hearing("fun_asr_nano_encoder"), "input_features_mask", [4, 0, 7], [4, 0, 7]),
        (
            hearing("vibevoice_acoustic_tokenizer_encoder", hop_length=320),
            "input_features_mask",
            [3000, 1, 0, 320, 321],
            [10, 1, 0, 1, 2],
        ),
        (hearing("inkling_audio"), "input_features_mask", [4, 0, 7], [4, 0, 7]),
        (hearing("wavtokenizer_encoder", hop_length=600), "input_features_mask", [1, 600, 601, 3000], [1, 1, 2, 5]),
        (hearing(None), "input_features_mask", [4, 0, 7], [4, 0, 7]),
    ],
)
def test_sounds_have_tokens_by_their_masks(config: Any, name: str, marked: list[int], tokens: list[int]) -> None:
    mask = (torch.arange(3000) < torch.tensor(marked)[:, None]).long()
    assert tokens_of_sounds(mask, config) == tokens
    heard = [number for number, count in enumerate(tokens) if count]
    rows = [tokens[number] for number in heard]
    features = torch.arange(len(heard)).float()[:, None, None].expand(-1, 5, 3000)
    batch = {"input_ids": ids([rows[:1], [], rows[1:]], 9), "input_features": features, name: mask[heard]}
    names, parts = divide_media(batch, 3, 1, config)
    assert names == ("input_features", name) and not parts[1]
    assert items_of_rows(SOUND, batch, config) == [1, 0, len(rows) - 1]
    assert parts[0]["input_features"][:, 0, 0].tolist() == [0]
    assert parts[2]["input_features"][:, 0, 0].tolist() == list(range(1, len(rows)))
    assert torch.equal(parts[2][name], mask[heard][1:])
    with pytest.raises(ValueError, match=f"input_features has {len(rows)} sounds, and their mask {len(rows) - 1}"):
        items_of_rows(SOUND, {**batch, name: mask[heard][1:]}, config)


def test_pieces_of_sounds_without_masks_share_the_placeholders_evenly() -> None:
    batch = {"input_ids": ids([[3], [], [3, 3]], 9), "input_features": torch.randn(3, 5, 16)}
    assert items_of_rows(SOUND, batch, hearing("voxtral_encoder")) == [1, 0, 2]
    with pytest.raises(ValueError, match="input_features has 3 sounds, and input_ids have 8 placeholder tokens"):
        items_of_rows(SOUND, {**batch, "input_ids": ids([[3], [], [3, 2]], 9)}, hearing("voxtral_encoder"))


def test_masks_of_unknown_encoders_of_sounds_are_refused() -> None:
    with pytest.raises(ValueError, match="the number of tokens of a sound is unknown for the encoder 'other'"):
        tokens_of_sounds(torch.ones(1, 4), hearing("other"))
    with pytest.raises(ValueError, match="a mask of 150 frames has no whole chunks of 100: pad the sounds"):
        tokens_of_sounds(torch.ones(1, 150), hearing("qwen3_asr_encoder", n_window=50))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": ids([[3], [3]])}, r"pixel_values has 4 images, and input_ids have 6 placeholder tokens"),
        ({"input_ids": ids([[3], [5]])}, r"tokens of row 0 end inside of one. Pass the images in the order"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(2, 4, 4)}, "pixel_values without input_ids"),
        ({"image_grid_thw": torch.tensor([[1, 2, 4]])}, "pixel_values has 4 patches, and image_grid_thw counts 8 in 1"),
        ({"input_ids": ids([[1]]), "image_sizes": torch.tensor([[8, 8]] * 4)}, "3 are left over"),
        ({"input_ids": ids([[5]]), "image_sizes": torch.tensor([[8, 8]] * 4)}, "row 0 end inside of one"),
    ],
)
def test_images_that_do_not_fit_the_placeholders_are_refused(changes: dict[str, Any], message: str) -> None:
    batch = {"input_ids": ids([[4], [4]]), "pixel_values": torch.randn(4, 3, 8, 8), **changes}
    with pytest.raises(ValueError, match=message):
        items_of_rows(IMAGE, batch, CONFIG)


def test_ranges_have_the_least_largest_work(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        work, parts = [rng.randint(1, 9) for _ in range(rng.randint(1, 7))], rng.randint(1, 4)
        ranges = divide_by_work(work, parts)
        assert len(ranges) == parts
        assert [place for start, stop in ranges for place in range(start, stop)] == [*range(len(work))]
        cuts = combinations_with_replacement(range(len(work) + 1), parts - 1)
        best = min(max(sum(work[a:b]) for a, b in pairwise((0, *cut, len(work)))) for cut in cuts)
        assert max(sum(work[a:b]) for a, b in ranges) == best


def test_arguments_of_a_tower_belong_to_its_items() -> None:
    grids = torch.tensor(GRIDS)  # 16, 16 and 24 patches
    call = TowerCall.of({"x": torch.randn(56, 5), "grid_thw": grids, "merge_sizes": grids[:, 0]}, "x", "Tower")
    assert (call.dim, call.lengths, call.entries([(0, 1), (1, 3), (3, 3)])) == (0, [16, 16, 24], [16, 40, 0])
    assert {name: value.tolist() for name, value in call.others(1, 2).items()} == {
        "grid_thw": [GRIDS[1]],
        "merge_sizes": [2],
    }
    assert TowerCall.of({"x": torch.randn(1, 56, 5), "grid_thw": grids}, "x", "Tower").dim == 1
    pixels, sizes = torch.randn(2, 3, 8, 8), [(8, 4), (4, 4)]
    call = TowerCall.of({"x": pixels, "image_sizes": sizes, "output_hidden_states": True}, "x", "Tower")
    assert (call.dim, call.lengths, call.work) == (0, [1, 1], [32, 16])
    assert call.others(1, 2) == {"image_sizes": [(4, 4)], "output_hidden_states": True}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": [torch.randn(3, 8, 8)]}, "cannot divide x of Tower: it is a list and no tensor; use tower_parallel"),
        (
            {"x": torch.randn(2, 8), "mask": torch.ones(3)},
            r"mask of Tower: its shape is \(3,\), and there are 2 images",
        ),
        (
            {"x": torch.randn(5, 8), "grid_thw": torch.tensor([[1, 2, 2]])},
            r"its shape is \(5, 8\), grid_thw counts \[4\]",
        ),
    ],
)
def test_arguments_that_cannot_be_divided_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TowerCall.of(given, "x", "Tower")
