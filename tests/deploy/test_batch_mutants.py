"""Each mistake in the running batch is caught by the named test."""

from __future__ import annotations

from typing import Any

import pytest

from support.mutants import Edit, assert_is_caught
from support.pool import Pool

BATCH, LOOP = "deploy.running_batch", "deploy/test_running_batch_loop.py"
POOLED, HEAD = "deploy/test_running_batch.py", "deploy/test_running_batch_head.py"
SLOTS, RUNNER, ROW = f"{BATCH}.slot_cache:SlotCache", f"{BATCH}.step_runner:StepRunner", f"{BATCH}.row"
MASK, PARTS = f"{BATCH}.slot_cache:mask_of", "deploy/test_slot_parts.py"
TAKES, SCHEDULER, ADMISSION = f"{BATCH}.loop:RunningBatch", f"{BATCH}.scheduler:Scheduler", f"{BATCH}.admission"
TOGETHER = "test_short_prompts_are_computed_together"
OWN, FAIR = "test_calls_are_answered_with_their_own_tokens", "test_schedule_is_fair_and_bounded"
ENDS, CANCELLED = "test_rows_end_at_their_own_tokens_and_are_padded", "test_cancelled_call_leaves_at_once"
PLAIN, KNOWN = f"{BATCH}.plain_settings:PlainSettings", "deploy/test_plain_settings.py"
PREPARED = f"{BATCH}.preparation"
PADDING, DEFAULTS = "test_padding_is_seen", "test_changes_of_the_defaults_and_the_model_are_followed"
BETWEEN, RAISES = (
    "test_other_calls_are_answered_between_steps_and_changes_after_the_rows",
    "test_processor_that_raises_ends_its_call_only",
)
GIVES_WAY = "test_call_that_cannot_join_gives_way_after_each_token"
FORWARD, REJECTED = (
    "test_failed_forward_ends_all_calls_and_later_ones_are_computed",
    "test_call_that_generate_rejects_fails_by_itself",
)
GROUPS, DROPPED, DIVIDED = (
    f"{BATCH}.slot_groups:SlotGroups",
    "test_row_that_is_dropped_while_its_step_is_computed_ends",
    "test_groups_share_the_rows_and_prefixes_decide",
)
PREFIXES, REUSED = f"{BATCH}.prefixes:Prefixes", "deploy/test_prefix_reuse.py"
SHARED, STAY = "test_shared_prefixes_are_computed_once", "test_prefixes_stay_while_rows_come_and_memory_grows"
FORGOTTEN, LOST = (
    "test_prefixes_are_forgotten_when_the_model_changes",
    "test_least_recently_used_is_lost_and_contained_ones_first",
)
ENDS_FIRST = "test_row_that_ends_first_changes_places_with_the_last"
NUCLEUS = (f"{BATCH}.nucleus:Nucleus.__call__", "deploy/test_nucleus.py", "test_bits_of_equal_and_special_values")
SIMULATED = "test_reused_tokens_are_a_prefix_of_the_prompt"
STAGE_FAILS = "test_stage_that_fails_ends_the_calls_and_no_others"
KEPT = "test_logits_stay_on_the_last_stage"
CHUNKS, TOGETHER = {"chunk": 4, "groups": 1}, "test_short_prompts_are_computed_together"
TWO_RANKS = {"variant": "llama", "sizes": {"tensor_parallel_size": 2}}
STATES = f"{BATCH}.slot_states:StateLayer"
CROSS, ENCODING = f"{BATCH}.own_caches:CrossSlots", f"{BATCH}.encoder_decoders:EncoderDecoderRunner"
OWN_PROMPTS = "test_rows_read_their_own_prompts"
EXACT, ADVANCED = (
    "test_rows_with_states_are_reused_as_a_whole",
    "test_state_of_a_row_that_is_dropped_is_not_reused",
)

STATIC, GRAPHS, SAMPLING = f"{BATCH}.static_step", f"{BATCH}.graphs:CudaGraphs", f"{BATCH}.sampling"
COME_AND_GO = "test_rows_with_penalties_come_and_go"
PENALTIES = f"{BATCH}.penalties:TokenTable"
STEPS, DRAWS = "deploy/test_static_step.py", "deploy/test_batched_sampling.py"
BUCKET, ZEROS = "test_step_sees_no_more_than_its_bucket", "test_columns_of_a_row_that_joins_are_zeros"
PADDED_STEPS = "test_padded_steps_compute_the_logits_of_the_eager_ones"
GEMMA = {"variant": "gemma3_text", "fused": False}
CAPTURED, DRAWN = (
    "test_capture_is_warmed_up_on_its_stream_and_shares_memory",
    "test_rows_draw_their_own_tokens",
)

Row = tuple[str, str, str, str, str, dict[str, Any]]
"""A function of the library, a piece of its source, the replacement; a test: file, name, arguments."""

IMAGES, SEEN = f"{BATCH}.prompt_images", "deploy/test_batched_images.py"
HELD, PIXELS = "test_chunks_hold_whole_images", "test_prefixes_are_found_by_the_pixels_too"
LLAVA, QWEN = ({"model_type": kind} for kind in ("llava", "qwen2_5_vl"))
BETWEEN_IMAGES, FAILS, DROPPED_IMAGES = (
    "test_rows_get_tokens_while_images_are_encoded",
    "test_images_that_fail_end_their_call_only",
    "test_images_of_calls_that_end_early_are_dropped",
)
AT_END = "test_prompt_that_ends_with_an_image_is_computed_from_its_first_token"
NEXT_TURN = "test_answer_about_an_image_is_part_of_the_next_prompt"

TENANTS, MIXED, MOVES = (
    "test_prompts_reuse_rows_of_their_tenant_only",
    "test_rows_of_mixed_lengths_have_their_own_logits",
    "test_parts_keep_the_positions_of_each_row",
)
BLOCKS = "minimax_m3_vl_text"
ATTEND = "test_decoders_of_the_zoo_attend_by_parts"
AFTER = "test_steps_after_drafts_have_the_logits_of_the_kept_tokens"
DRAFTED, FOLLOWS = f"{BATCH}.draft_model:DraftModel", "test_calls_with_a_draft_model_get_their_own_tokens"
DRAFTS, SPECULATED = f"{BATCH}.speculation", "deploy/test_speculation.py"
KEEPS, LAGGING = "test_cache_keeps_the_positions_of_each_row", "test_steps_of_fixed_shapes_follow_drafts"
GUESSED = "test_calls_get_their_own_tokens"
FILLED, LLAMA = "test_step_has_drafts_if_half_of_its_positions_have_tokens", {"variant": "llama", "fused": False}

SOUNDS, HEARD = f"{BATCH}.sound_runner:SoundRunner", "deploy/test_batched_sounds.py"
OWN_SOUNDS, AFTER_SOUND = "test_rows_with_sounds_get_their_own_tokens", "test_rows_get_a_token_between_two_sounds"
HEARING, WINDOWS = {"model_type": "whisper", "sizes": {"tensor_parallel_size": 2}}, "test_windows_of_whisper_join"

FAST: list[Row] = [
    (
        f"{BATCH}.loop:RunningBatch._run",
        "self._images.pop((step.number, step.row))",
        "self._images.pop(max(self._images))",  # the sound of another row, which waits, too
        HEARD,
        AFTER_SOUND,
        {},
    ),
    (
        f"{SOUNDS}._encode_media",
        "failure = error",
        "raise",
        HEARD,
        "test_sound_that_fails_ends_its_call_only",
        {"model_type": "whisper"},
    ),
    (
        f"{SCHEDULER}._encoder_positions",
        "int(prompt.images.encoder_positions)",
        "0",
        HEARD,
        AFTER_SOUND,
        {},
    ),
    (
        f"{DRAFTS}:going_on",
        "rows[index].new[-1] == drafts[index][place]",
        "True",
        SPECULATED,
        "test_drawn_tokens_have_the_distribution_of_the_model",
        {},
    ),
    (f"{SLOTS}.settle", "layer.draw_back(lags_N2, most)", "pass", SPECULATED, KEEPS, {"static": False}),
    (
        f"{BATCH}.slot_states:StateLayer.settle",
        "self._before_tokens, counts",
        "self._before_tokens, ()",
        SPECULATED,
        "test_calls_with_drafts_get_their_own_tokens",
        {"variant": "qwen3_next", "sizes": {"tensor_parallel_size": 2}},
    ),
    (
        f"{BATCH}.slot_states:StateLayer.cut",
        "- count for",
        "for",
        SPECULATED,
        "test_states_before_steps_stay_while_rows_lag",
        {},
    ),
    (
        f"{BATCH}.slot_states:StateLayer.settle",
        "self._before_tokens, counts",
        "self._before_steps, counts",
        SPECULATED,
        "test_states_before_steps_stay_while_rows_lag",
        {},
    ),
    (MASK, "& (columns_L < ends_B[:, None])", "", SPECULATED, GUESSED, {"groups": 1}),
    (MASK, ">= (window", "> (window", LOOP, OWN, CHUNKS),
    (f"{ROW}:Row.__init__", "manual_seed(seed)", "manual_seed(0)", LOOP, OWN, CHUNKS),
    (f"{SCHEDULER}.drop", "row.ended = True", "pass", LOOP, CANCELLED, {"state": "row"}),
    (f"{TAKES}._take_all", "self._fail(row.number, error)", "raise", LOOP, RAISES, {"when": 1}),
    (f"{BATCH}.scheduler:_computed", "row.new[:-1]", "row.new", LOOP, SHARED, {"reuses": True}),
    (f"{PREFIXES}._reusable", "prompt[:-1]", "prompt", REUSED, LOST, {}),
    (
        f"{ADMISSION}:Admission.joins",
        "not mask_BL.all()",
        "False",
        LOOP,
        "test_padded_calls_of_types_that_read_padding_do_not_join",
        {"variant": "xlstm", "expected": False},
    ),
    (f"{PREFIXES}._reusable", "self.is_exact and", "False and", REUSED, EXACT, {}),
    (f"{PREFIXES}.find", "if former.tenant == tenant", "", REUSED, TENANTS, {}),
    (f"{SCHEDULER}._find_prefix", "if row.tenant == prompt.tenant else []", "", REUSED, TENANTS, {}),
    (
        "fusion.attention_parts:attention_by_parts",
        "mask.shape[-1] - keys.shape[2] :",
        ": keys.shape[2]",
        PARTS,
        MIXED,
        {"attention": "sdpa", "fused": False},
    ),
    (
        f"{BATCH}.slot_parts:PartedSlots._move_long_rows",
        "own) + length, length",
        "own) + length, length - 1",
        PARTS,
        MOVES,
        {},
    ),
    *(
        (f"fusion.attention_parts:{place}", before, after, PARTS, ATTEND, {"variant": variant})
        for place, before, after, variant in (
            ("_of_part", "value.shape[-1] - columns :", ": columns", "bloom"),
            ("_forward_by_parts", "projected[rows]", "projected[: len(part.lengths)]", "mpt"),
        )
    ),
    (f"{BATCH}.slot_parts:PartedSlots.settle", "counts[slot]", "counts[0]", PARTS, MOVES, {}),
    (f"{BATCH}.slot_parts:_Part.gives_back", "layer.move(free, own, *bounds)", "pass", PARTS, MOVES, {}),
    (f"{SCHEDULER}.drop", "row.shares = False", "pass", REUSED, ADVANCED, {"is_dropped": True, "reused": 0}),
    (f"{RUNNER}._prefill_whole", "positions_BL >= 0", "positions_BL >= 2", LOOP, TOGETHER, {}),
    (f"{CROSS}.free", "self.cross.free(slot)", "self.cross.free(-1)", POOLED, OWN_PROMPTS, {"variant": "t5"}),
    (
        f"{BATCH}.position_tables:looking_up",
        "positions_BL.flatten()",
        "positions_BL.flip(0).flatten()",
        POOLED,
        OWN_PROMPTS,
        {"variant": "bart"},
    ),
    (
        f"{IMAGES}:_digest",
        "digest.update(x.reshape(-1).view(torch.uint8).numpy().data)",
        "pass",
        SEEN,
        PIXELS,
        LLAVA,
    ),
]
"""Mutants in this process."""

SLOW: list[Row] = [
    (
        f"{BATCH}.position_tables:looking_up",
        "positions_BL.reshape(-1, 1)",
        "positions_BL.flip(0).reshape(-1, 1)",
        POOLED,
        OWN_PROMPTS,
        {"variant": "pegasus_x"},
    ),
    (
        f"{ENCODING}._forward",
        'inputs["decoder_position_ids"] = positions',
        "pass",
        POOLED,
        OWN_PROMPTS,
        {"variant": "t5gemma"},
    ),
    (f"{BATCH}.prompt_sounds:sounds_of_call", "features[row : row + 1]", "features[:1]", HEARD, OWN_SOUNDS, HEARING),
    (f"{CROSS}.join", "row, tokens, tokens", "row, tokens, 1", HEARD, OWN_SOUNDS, HEARING),
    (
        f"{SOUNDS}._length",
        "if mask_1L is None",
        "if True",
        HEARD,
        OWN_SOUNDS,
        {**HEARING, "model_type": "speech_to_text"},
    ),
    (
        "deploy.windows:generate_by_windows",
        "random if state is None else state",
        "random",
        HEARD,
        WINDOWS,
        {"sizes": HEARING["sizes"]},
    ),
    (f"{DRAFTS}:Drafts.draft", "row.room - 1", "row.room", SPECULATED, FILLED, {}),
    (f"{DRAFTS}:Drafts.draft", "positions < LEAST_FILLED", "positions < 0 * LEAST_FILLED", SPECULATED, FILLED, {}),
    (
        f"{DRAFTS}:Acceptance.note",
        "self._share < LEAST_ACCEPTED",
        "False",
        SPECULATED,
        "test_rows_with_few_accepted_tokens_pause_for_longer_and_longer",
        {},
    ),
    (
        f"{DRAFTS}:PromptLookup.draft",
        "if token < 0",
        "if False",
        SPECULATED,
        "test_images_are_not_drafted",
        {},
    ),
    (f"{SCHEDULER}.plan", "step.settled = settled", "pass", SPECULATED, GUESSED, {"groups": 2}),
    (f"{DRAFTED}._drop_wrong", "len(held) - right", "0", SPECULATED, FOLLOWS, {"groups": 1}),
    (f"{DRAFTED}._join", "row.new[:-1]", "row.new", SPECULATED, "test_draft_model_computes_only_new_tokens", {}),
    (f"{DRAFTED}._leave", "self._runner.free([slot])", "pass", SPECULATED, FOLLOWS, {"groups": 1}),
    (f"{SLOTS}.cut", "self.lags.get(slot, 0) + count", "self.lags.get(slot, 0)", SPECULATED, FOLLOWS, {"groups": 1}),
    (
        f"{TAKES}._take_drafted",
        "spent > STEP_SECONDS",
        "False",
        SPECULATED,
        "test_slow_processors_take_fewer_of_the_drafted_tokens",
        {},
    ),
    (f"{SLOTS}.free", "self.lags[slot] = lag", "pass", SPECULATED, KEEPS, {"static": False}),
    (f"{SLOTS}._move_stop", "self.stop -= least", "pass", SPECULATED, KEEPS, {"static": False}),
    (f"{SLOTS}.fork", "if slot in self.lags", "if False", SPECULATED, KEEPS, {"static": False}),
    (f"{SLOTS}.begin", "- self.lags.get(slot, 0)", "", SPECULATED, KEEPS, {"static": False}),
    (
        f"{BATCH}.slot_cache:_SlotLayer._aligned",
        "cache.lags.get(slot, 0)",
        "0",
        SPECULATED,
        KEEPS,
        {"static": True},
    ),
    (
        f"{SLOTS}.make_room",
        "and self.window <= columns(longest)",
        "",
        SPECULATED,
        "test_rows_that_lag_far_are_aligned_again",
        {},
    ),
    (f"{RUNNER}._grow", "rows.settle([1] * len(rows.lengths))", "rows.grow(1)", SPECULATED, AFTER, {"static": False}),
    (f"{STATIC}:_Inputs.load", "cache.lags.get(slot, 0)", "0", SPECULATED, LAGGING, LLAMA),
    (
        f"{STATIC}:StaticSteps._computation",
        "shown_BL | (columns_L >= inputs.stop)",
        "shown_BL",
        SPECULATED,
        LAGGING,
        LLAMA,
    ),
    (
        f"{STATIC}:StaticSteps._computation",
        "columns_L <= inputs.last_B[:, None]",
        "columns_L >= 0",
        SPECULATED,
        LAGGING,
        LLAMA,
    ),
    (
        f"{ADMISSION}:reason_against_drafts",
        "window < columns(length)",
        "window < length",
        SPECULATED,
        "test_a_window_of_the_whole_cache_is_no_window",
        {},
    ),
    (f"{IMAGES}:PromptImages.reuse_keys", "digest if key == self.token else key", "key", SEEN, PIXELS, LLAVA),
    (f"{IMAGES}:PromptInProgress.offsets.fget", "+ 1 -", "-", SEEN, NEXT_TURN, QWEN),
    (
        f"{IMAGES}:_encoded",
        "own, first, stop",
        "own, 0, stop - first",
        SEEN,
        BETWEEN_IMAGES,
        LLAVA,
    ),
    (f"{IMAGES}:PromptImages.chunk_end", "if first < stop < end", "if False", SEEN, HELD, {}),
    (f"{IMAGES}:PromptImages.whole", "if first < length < end", "if False", SEEN, HELD, {}),
    (f"{RUNNER}.free", "self._by_slot[-1]", "self._by_slot[slot]", SEEN, BETWEEN_IMAGES, QWEN),
    (f"{RUNNER}._arrange", "if any(map(any, offsets))", "if False", SEEN, BETWEEN_IMAGES, QWEN),
    (f"{SCHEDULER}._next_step", "begins or images[0] < images[1]", "begins", SEEN, HELD, {}),
    (f"{SCHEDULER}._find_prefix", "prompt.images.whole(found)", "found", SEEN, AT_END, LLAVA),
    (f"{TAKES}._compute", "except ImagesError as error", "except ZeroDivisionError as error", SEEN, FAILS, LLAVA),
    (f"{TAKES}._forget", "self._forgotten.append(number)", "pass", SEEN, DROPPED_IMAGES, LLAVA),
    (NUCLEUS[0], "sorted_V[removed - 1] == least", "False", *NUCLEUS[1:], {}),
    (NUCLEUS[0], "warper.min_tokens_to_keep", "1", *NUCLEUS[1:], {}),
    (NUCLEUS[0], "<= 1 - warper", "< 1 - warper", *NUCLEUS[1:], {}),
    (NUCLEUS[0], "scores < least", "scores <= least", *NUCLEUS[1:], {}),
    (f"{BATCH}.scheduler:_computed", "row.new[:-1]", "row.new", REUSED, SIMULATED, {}),
    (f"{PREFIXES}._drop_prefixes_of", "not self._replaces(tokens, tenant, kept)", "True", REUSED, LOST, {}),
    (f"{PREFIXES}.find", "self._held[slot] = self._held.pop(slot)", "pass", REUSED, LOST, {}),
    (f"{PREFIXES}.displace", "other not in self._held", "True", REUSED, LOST, {}),
    (f"{PREFIXES}.displace", "del self._held[slot]", "pass", REUSED, LOST, {}),
    (
        f"{PREFIXES}.find",
        "(*enumerate(rows), *own)",
        "own",
        LOOP,
        SHARED,
        {"reuses": True},
    ),
    (f"{RUNNER}._prefill_whole", "cache.layers, row", "cache.layers, 0", LOOP, TOGETHER, {}),
    (f"{ENCODING}._forward", "cross.mask(0, lengths_B)", "None", POOLED, OWN_PROMPTS, {"variant": "t5"}),
    (
        f"{ENCODING}._begin_rows",
        "longest, device=self._device) <",
        "longest) <=",
        POOLED,
        OWN_PROMPTS,
        {"variant": "t5"},
    ),
    (f"{CROSS}.join", "row, length, length", "0, length, length", POOLED, OWN_PROMPTS, {"variant": "bart"}),
    (
        f"{CROSS}.fork",
        "self.cross.fork(slot, count)",
        "self.cross.fork(-1, count)",
        POOLED,
        OWN_PROMPTS,
        {"variant": "t5"},
    ),
    (f"{RUNNER}._prefill_whole", "positions_BL.clamp(min=0)", "torch.arange(longest)[None]", LOOP, TOGETHER, {}),
    (f"{SCHEDULER}._whole_prompts", "self._find_prefix(row)[1]", "False", REUSED, SIMULATED, {}),
    (f"{SCHEDULER}._whole_prompts", "any(self.prefixes.are_alike", "all(self.prefixes.are_alike", LOOP, TOGETHER, {}),
    (f"{SCHEDULER}._whole_prompts", "self.padding * tokens", "self.chunk", LOOP, TOGETHER, {}),
    (f"{SCHEDULER}._whole_prompts", "self.slots - len(self.rows)", "self.slots", POOLED, FAIR, {}),
    (f"{SCHEDULER}._join", "self._since_rows += len(whole)", "self._since_rows += 0 * len(whole)", POOLED, FAIR, {}),
    (f"{GROUPS}.rows", "step.joining :", "1 :", LOOP, OWN, {"chunk": 64, "groups": 1}),
    (f"{TAKES}._take_all", "if row.ended:", "if False:", LOOP, DROPPED, {}),
    (f"{TAKES}._lead", "while self._ahead:", "while False:", LOOP, BETWEEN, {"groups": 2}),
    (f"{GROUPS}.add", "if group is not None and saved", "if False", LOOP, DIVIDED, {}),
    (f"{GROUPS}.add", "min(groups", "max(groups", LOOP, DIVIDED, {}),
    (f"{SCHEDULER}.forget_prefixes", "row.shares = False", "pass", LOOP, FORGOTTEN, {}),
    (f"{TAKES}.forget_prefixes", "self._slots.forget_prefixes()", "pass", LOOP, FORGOTTEN, {}),
    (f"{SCHEDULER}.clear", "self.forget_prefixes()", "pass", LOOP, "test_failed_forward_leaves_no_prefixes", {}),
    (f"{SLOTS}.free", "self.stop, self._keeps)", "self.stop)", LOOP, ENDS_FIRST, {}),
    (f"{SLOTS}.free", "= begin, end", "= 0, end", LOOP, ENDS_FIRST, {}),
    (f"{SLOTS}.append", "max(slot, displaced)", "slot", LOOP, STAY, {"rows": 5}),
    (f"{SLOTS}.append", "layer.move(displaced, slot, *former)", "pass", LOOP, STAY, {"rows": 3}),
    (f"{SLOTS}.begin_with", "other.begin(slot)", "0", LOOP, ENDS_FIRST, {}),
    (
        f"{BATCH}.slot_cache:_SlotLayer.relocate",
        "target[slot, :, : held.shape[2]] = held[slot]",
        "pass",
        LOOP,
        STAY,
        {"rows": 5},
    ),
    (f"{SLOTS}.free", "self.lengths[slot] = self.lengths[last]", "pass", LOOP, OWN, CHUNKS),
    (
        f"{RUNNER}._arrange",
        "lengths_B1 + steps_BL",
        "lengths_B1 * 0 + rows.window + steps_BL",
        LOOP,
        OWN,
        CHUNKS,
    ),
    (f"{ROW}:_Ends.__call__", "token in self._tokens", "False", LOOP, ENDS, {}),
    (
        f"{ADMISSION}:_is_padded",
        "shown_BL[:, -1].all()",
        "True",
        LOOP,
        "test_admission",
        {"what": "a row of padding"},
    ),
    (f"{SCHEDULER}._rows_wait", "self._since_rows + tokens > self.chunk", "False", POOLED, FAIR, {}),
    (f"{SLOTS}.free", "layer.move(slot, last, 0, self.stop, self._keeps)", "pass", LOOP, OWN, CHUNKS),
    (f"{SLOTS}.append", "max(0, length - max(self.lengths))", "0", LOOP, ENDS_FIRST, {}),
    (f"{SLOTS}.start.fget", "self.stop - self.window", "0", LOOP, OWN, CHUNKS),
    (
        f"{SLOTS}._relocate",
        "self.stop = columns, before + self.window",
        "self.stop = columns, self.stop",
        LOOP,
        ENDS_FIRST,
        {},
    ),
    (
        f"{RUNNER}._prefill",
        "torch.arange(done, stop, ",
        "torch.arange(stop - done, ",
        LOOP,
        OWN,
        CHUNKS,
    ),
    (f"{RUNNER}._begin", "prompt.lengths = [0]", "prompt.lengths = [1]", LOOP, OWN, CHUNKS),
    (f"{RUNNER}.free", "self.rows.free(slot)", "pass", LOOP, OWN, CHUNKS),
    (f"{PREPARED}:prepare", "mask_BL[row : row + 1]", "mask_BL[:1]", LOOP, OWN, CHUNKS),
    (f"{PREPARED}:_check_tokens", "max(tokens) >= vocabulary", "False", LOOP, REJECTED, {}),
    (f"{PREPARED}:_prepare_row", "ids_BL[0, mask_BL[0].bool()]", "ids_BL[0]", LOOP, OWN, CHUNKS),
    (f"{PLAIN}.find", "if any(token in prompt for token in padding)", "if False", KNOWN, PADDING, {}),
    (f"{PLAIN}.key", "bool(mask_BL.all())", "True", KNOWN, PADDING, {}),
    (f"{PLAIN}._follow_defaults", "self.forget()", "pass", KNOWN, DEFAULTS, {}),
    (f"{ROW}:Row.take", "self.processed(logits_V)", "logits_V", LOOP, OWN, CHUNKS),
    (f"{ROW}:Row.ids_BL.fget", "= held_BL[:, : self._written]", "= 0", LOOP, OWN, CHUNKS),
    (f"{ROW}:Call._tokens", "value=row.pad", "value=0", LOOP, ENDS, {}),
    (f"{ROW}:Call.ended.fget", "all(", "any(", LOOP, ENDS, {}),
    (f"{SCHEDULER}._next_step", "self._done += len(chunk)", "self._done = len(chunk)", POOLED, FAIR, {}),
    (f"{SCHEDULER}._next_step", "self.waiting.popleft()", "self.waiting.pop()", POOLED, FAIR, {}),
    (f"{SCHEDULER}._next_prompt", "len(self.rows) < self.slots", "True", POOLED, FAIR, {}),
    (
        f"{SCHEDULER}.drop",
        "self.prompt is not None and unwanted(self.prompt)",
        "False",
        LOOP,
        CANCELLED,
        {"state": "prompt"},
    ),
    (f"{SCHEDULER}.drop", "if not unwanted(row)", "", LOOP, CANCELLED, {"state": "waiting"}),
    (f"{TAKES}._drop_cancelled", "self._send(Reply(number), number)", "pass", LOOP, CANCELLED, {"state": "row"}),
    (f"{TAKES}._forget", "self._cancelled.discard(number)", "pass", LOOP, CANCELLED, {"state": "row"}),
    (f"{TAKES}._take_messages", "message.method in CHANGING", "False", LOOP, BETWEEN, {"groups": 2}),
    (f"{TAKES}._take", "message.joins", "True", LOOP, BETWEEN, {"groups": 2}),
    (f"{TAKES}._lead", "messages.answer(held)", "pass", LOOP, BETWEEN, {"groups": 2}),
    (f"{TAKES}.wants_turn", "not self._slots.is_idle", "False", LOOP, GIVES_WAY, {"groups": 1, "first": True}),
    (
        f"{TAKES}.wants_turn",
        "self._take_messages(self._messages)",
        "pass",
        LOOP,
        GIVES_WAY,
        {"groups": 1, "first": True},
    ),
    (f"{TAKES}._finish", "[(call.number, None) for call in ended if call.streams]", "[]", LOOP, OWN, CHUNKS),
    (f"{TAKES}._give_up", "self._slots.clear()", "pass", LOOP, FORWARD, {}),
    (f"{TAKES}._give_up", "self._clear()", "pass", LOOP, FORWARD, {}),
    (
        f"{ADMISSION}:Admission.joins",
        "1 if streams",
        "2 if streams",
        LOOP,
        "test_admission",
        {"what": "two sampled rows"},
    ),
    (
        f"{ADMISSION}:Admission.joins",
        "total <= self._longest",
        "total - 1 <= self._longest",
        LOOP,
        "test_admission",
        {"what": "too long"},
    ),
    (
        f"{ADMISSION}:_is_padded",
        "(shown_BL[:, 1:] >= shown_BL[:, :-1]).all()",
        "True",
        LOOP,
        "test_admission",
        {"what": "hole in the mask"},
    ),
    (f"{BATCH}.head_product:fast_head", "head.__class__ = own", "pass", HEAD, "test_head_is_lent_another_class", {}),
    (
        f"{RUNNER}._arrange",
        "lengths_B1 + steps_BL",
        "lengths_B1 * 0 + rows.window + steps_BL",
        POOLED,
        "test_calls_get_their_own_tokens",
        TWO_RANKS,
    ),
    (MASK, ">= (window", "> (window", POOLED, "test_calls_get_their_own_tokens", TWO_RANKS),
    (f"{BATCH}.slot_cache:_SlotLayer.copy", "own[slot, :, stop:] = 0", "pass", STEPS, ZEROS, {}),
    (f"{BATCH}.slot_cache:_SlotLayer.relocate", "target[:rows, :, at + longest :] = 0", "pass", STEPS, ZEROS, {}),
    (f"{STATIC}:_Inputs.load", "[cache.columns - 1]", "[cache.stop]", STEPS, BUCKET, {}),
    (f"{STATIC}:StaticSteps._computation", ">= inputs.first_B", "> inputs.first_B", STEPS, PADDED_STEPS, GEMMA),
    (f"{STATIC}:_StaticSlots.get_seq_length", "self.stop", "0", STEPS, PADDED_STEPS, GEMMA),
    (f"{STATIC}:_StaticLayer.update", "self._inputs.written_BW", "self._inputs.stop", STEPS, BUCKET, {}),
    (f"{STATIC}:StaticSteps.run", "cache.compact()", "pass", STEPS, "test_short_rows_move_to_the_first_columns", {}),
    (
        f"{STATIC}:StaticSteps.run",
        "if self._allocations != cache.allocations",
        "if False",
        STEPS,
        "test_graphs_are_kept_until_the_memory_or_the_model_changes",
        {},
    ),
    (f"{RUNNER}.clear", "self.drop_graphs()", "pass", STEPS, "test_memory_that_runs_out_drops_the_graphs", {}),
    (
        f"{RUNNER}._replay",
        "self.static, self.eager_reason = None,",
        "self.eager_reason =",
        STEPS,
        "test_capture_that_fails_is_told_once_and_steps_are_computed_eagerly",
        {},
    ),
    (
        f"{TAKES}.forget_prefixes",
        "runner.drop_graphs()",
        "pass",
        STEPS,
        "test_change_of_the_model_drops_the_graphs",
        {},
    ),
    (f"{GRAPHS}._graph_of", "torch.cuda.set_stream(current)", "pass", STEPS, CAPTURED, {"fails": True}),
    (f"{GRAPHS}._graph_of", '"thread_local"', '"global"', STEPS, CAPTURED, {"fails": False}),
    (f"{GRAPHS}._captured", "self._graphs.add(graph)", "pass", STEPS, CAPTURED, {"fails": False}),
    (f"{GRAPHS}._captured", "current.wait_stream(stream)", "pass", STEPS, CAPTURED, {"fails": False}),
    (
        f"{SAMPLING}:_warped",
        "vocabulary - top_k_B1",
        "vocabulary - 1 - top_k_B1.clamp(max=100)",
        DRAWS,
        DRAWN,
        {"ties": False},
    ),
    (f"{SAMPLING}:_warped", "removed_BV[:, -1] = False", "pass", DRAWS, DRAWN, {"ties": False}),
    (f"{SAMPLING}:_warped", "* min_p_B1.float()", "* 0", DRAWS, DRAWN, {"ties": False}),
    (f"{PENALTIES}._late", "written + place", "written + place + 1", DRAWS, DRAWN, {"ties": False}),
    (f"{PENALTIES}.penalize_", "< start_P[:, None]", "< 0 * start_P[:, None]", DRAWS, COME_AND_GO, {}),
    (f"{PENALTIES}.penalize_", "scores_PV < 0", "scores_PV < 1", DRAWS, DRAWN, {"ties": False}),
    (
        f"{PENALTIES}._make_room",
        "self._ids_SL[slot, length:] = empty",
        "pass",
        DRAWS,
        COME_AND_GO,
        {},
    ),
    (f"{ROW}:Row.draw_", "generator=self.generator", "", DRAWS, DRAWN, {"ties": False}),
    (f"{SAMPLING}:_drawn_scores", "scores_BV[index] = row.processed", "row.processed", DRAWS, DRAWN, {"ties": False}),
    (
        f"{SAMPLING}:choose_tokens",
        "is_nan and together[index]",
        "False",
        DRAWS,
        "test_processor_that_raises_and_nan_end_their_calls",
        {},
    ),
    (
        f"{SAMPLING}:choose_tokens",
        "best_B.isnan()), 1)).tolist()",
        "best_B.isnan()), 1)).tolist() if token_B.tolist() else []",
        DRAWS,
        "test_host_waits_once_and_copies_twice_in_a_step",
        {"rows": 8},
    ),
    (
        f"{ROW}:Row.take_token",
        "self._length += 1",
        "self._length += 1 + 0 * int(self.ids_BL.sum())",
        DRAWS,
        "test_host_waits_once_and_copies_twice_in_a_step",
        {"rows": 8},
    ),
    (
        f"{ADMISSION}:bytes_of_token",
        'getattr(block, "num_key_value_heads", None) or heads',
        "heads",
        "deploy/test_default_limits.py",
        "test_limits",
        {"gpus": 1, "ranks": 1, "layers": 32, "given": {}, "expected": (32, 4096, 2048)},
    ),
    *(
        (f"{BATCH}.{place}", before, after, POOLED, "test_rows_have_their_own_states", {"variant": variant})
        for place, before, after, variant in (
            ("slot_states:StateLayer.show", "of_states), continues", "of_states), True", "bamba"),
            ("slot_states:StateLayer.move", "entries[slot] = entries[source]", "pass", "bamba"),
            ("slot_states:StateLayer.move", "self._entries.values()", "self.held", "falcon_h1"),
            ("slot_states:StateLayer.copy", "= entries[row]", "= entries[0]", "bamba"),
            ("slot_states:StateLayer.copy", "self._entries[key][slot] = entries[row]", "pass", "bamba"),
            ("slot_states:StateLayer._show_rows", "entries[: len", "entries.flip(0)[: len", "bamba"),
            ("slot_states:StateLayer.relocate", "self._entries[key][: len(entries)] = entries", "pass", "bamba"),
            ("slot_cache:_SlotLayer._append_index", "= states", "= states.roll(1, 0)", "deepseek_v32"),
            ("slot_cache:SlotCache.positions_of_columns", "self.start - begin_B1", "0 * begin_B1", BLOCKS),
            ("own_caches:XlstmSlots.argument.fget", "if not self.window", "if True", "xlstm"),
        )
    ),
    (
        f"{STATES}.fork",
        "entries[first : first + count] = entries[slot]",
        "pass",
        "modeling/test_generate_batch.py",
        "test_sequences_have_the_tokens_of_generate",
        {"variant": "bamba", "tp": 2, "pp": 1},
    ),
    ("pipeline.pipeline:Pipeline._generation_step", "not self._keeps_logits", "True", POOLED, KEPT, {}),
    (
        "pipeline.pipeline:Pipeline._generation_step",
        "if self.stage.is_last else logits[:, :0]",
        "",
        POOLED,
        KEPT,
        {},
    ),
    (
        f"{TAKES}._give_up",
        "self.runners[step.group].skip(step)",
        "pass",
        POOLED,
        STAGE_FAILS,
        {"stages": 2, "failing": 0, "where": "in the model"},
    ),
    (
        f"{RUNNER}.run",
        "not self._is_passed_on",
        "False",
        POOLED,
        STAGE_FAILS,
        {"stages": 2, "failing": 0, "where": "before the model"},
    ),
    (
        f"{TAKES}._follow",
        "self.runners[step.group].skip(step)",
        "pass",
        POOLED,
        STAGE_FAILS,
        {"stages": 2, "failing": 0, "where": "in the model"},
    ),
]
"""`make test-zoo` runs them; the last ones on two ranks."""


def cases() -> list[Any]:
    marked = [(row, ()) for row in FAST] + [(row, pytest.mark.zoo) for row in SLOW]
    return [
        pytest.param(Edit(*row[:3]), *row[3:], marks=marks, id=f"{row[0].partition(':')[2]}-{row[1][:24]}-{row[4]}")
        for row, marks in marked
    ]


@pytest.mark.parametrize(("edit", "file", "name", "arguments"), cases())
def test_mistake_is_caught(
    request: pytest.FixtureRequest, pool: Pool, edit: Edit, file: str, name: str, arguments: dict[str, Any]
) -> None:
    """The test passes, and fails with the mistake."""
    assert_is_caught(request, pool, edit, file, name, arguments)
