"""Recipes of ``oslo-models sft``, ``dpo``, ``grpo`` and ``pretrain``: parsed, checked, started and trained.

A recipe has the keys of ``trl sft --config`` and the keys of `keys.ParallelArguments`. `parsing` turns it into the
dataclasses of TRL and transformers. `checks` finds mistakes before processes start, `launching` starts the ranks, and
`training` runs on each of them.
"""
