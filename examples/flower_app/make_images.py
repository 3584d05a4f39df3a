"""Writes handwritten digits as the photos of four sites, each with a camera of its own.

The files are images/SITE/train/CLASS/*.png and images/SITE/test/CLASS/*.png.
"""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

CAMERAS = [lambda x: x, lambda x: 1 - x, lambda x: 0.25 * x, lambda x: 0.6 + 0.3 * x]

images, labels = load_digits(return_X_y=True)
for number, (image, label) in enumerate(zip(images.reshape(-1, 8, 8) / 16, labels, strict=True)):
    site = number % len(CAMERAS)
    part = "test" if number % 5 == 0 else "train"
    folder = Path("images", f"site-{site}", part, str(label))
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.uint8(255 * CAMERAS[site](image))
    Image.fromarray(pixels).save(folder / f"{number}.png")
