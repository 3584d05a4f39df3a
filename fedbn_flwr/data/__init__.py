"""Data sets, their partitions, and the batches that clients train on."""

IGNORED = 255  # the label of a pixel that counts neither in training nor in evaluation (Cityscapes, Pascal VOC)
