"""The running batch: calls of `generate` that join and leave one batch at each decoding step.

The leader is the first rank of the last pipeline stage. It plans each step, draws the tokens and ends the rows. All
other ranks are followers: they run the steps that the leader plans. In the order of imports:

* `limits`, `sound_calls`, `admission`: decide in the application which calls may join;
* `draft_loading`: the model that drafts tokens;
* `prompt_images`, `prompt_sounds`: the images of prompts, their digests and features, and the sounds;
* `step`, `plan_channel`: the plan of one step, and the channel that sends it from the leader to the followers;
* `slot_cache`, `static_step`, `graphs`, `head_product`, `step_runner`: the key-value cache of the batch and the model's
  forward on it, on every rank, replayed from CUDA graphs where possible;
* `encoder_decoders`, `sound_runner`, `runners`: the same for models with an encoder of tokens or of sounds;
* `nucleus`, `sampling`, `row`, `preparation`: sampling and stopping of each row, on the leader;
* `speculation`, `draft_model`: drafted tokens of the rows, on the leader;
* `prefixes`, `scheduler`, `slot_groups`: prefix reuse and scheduling, on the leader;
* `loop`: the worker loop that runs all of them.
"""
