"""Data sets, their partitions, and the batches that clients train on."""

IGNORED = 255  # the label of a pixel that counts neither in training nor in evaluation (Cityscapes, Pascal VOC)

Size = tuple[int, int]  # height and width in pixels
Moments = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation per channel, pixels from 0 to 1
