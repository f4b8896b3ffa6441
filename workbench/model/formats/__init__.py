"""Read the storage formats of a model's tensors, one file each; `open_checkpoint` chooses the format by the files at a
path.
"""
