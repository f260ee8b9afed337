"""The packed tree and the target's logits → the accepted run."""
