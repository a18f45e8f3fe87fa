"""One model over several ranks: tensor, pipeline, expert and context parallel, on torch.distributed."""
