"""What ``fuse()`` swaps in: the rules, the fused modules, lazy logits and the fused loss."""
