"""The running batch: calls of `generate` that join and leave one batch at each decoding step.

The first rank of the last stage, the leader, schedules: it decides what a step computes, draws the tokens and ends the
rows. The other ranks, the followers, compute what it tells them. In the order of imports:

* `limits`, `admission`: in the application, which calls may join;
* `step`: what the ranks compute together, `plan_channel`: how the leader tells it;
* `slot_cache`, `static_step`, `graphs`, `head_product`, `step_runner`: the key-value cache of the batch and the model's
  forward on it, on every rank, by CUDA graphs where there are such;
* `nucleus`, `sampling`, `row`: what is generated, `prefixes`, `scheduler`, `slot_groups`: what is computed, and when,
  on the leader;
* `loop`: brings them together in a worker.
"""
