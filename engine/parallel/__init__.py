"""One model over several ranks: tensor and pipeline parallel, on torch.distributed."""
