"""Scans of three hospitals, and networks of MONAI for them.

`python scans.py` writes scans/HOSPITAL/train and test: scans with and without a lesion, generated, and their masks.
Each hospital's scanner has its own contrast. The hospital in new/ joins after the training.
"""

from pathlib import Path

import numpy as np
from monai.losses import DiceCELoss
from monai.networks.nets import DenseNet121, UNet
from monai.transforms import LoadImage

SCANNERS = {"north": (1, 0, 0.4), "south": (-2, 3, 0.8), "west": (0.5, -2, 0.2)}  # contrast, level, noise
NEW = {"east": (-1, 0.5, 0.5)}
SIDE = 32


def write(folder, scanners, seed, train=60, test=30):
    random = np.random.default_rng(seed)
    rows, columns = np.indices((SIDE, SIDE))
    for hospital, (contrast, level, noise) in scanners.items():
        for part, count in {"train": train, "test": test}.items():
            there = Path(folder, hospital, part)
            there.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                (y, x), radius = random.uniform(8, SIDE - 8, 2), random.uniform(4, 8)
                lesion = (rows - y) ** 2 + 1.5 * (columns - x) ** 2 < radius**2 * (number % 2)
                organ = np.sin(rows / random.uniform(4, 8)) * np.cos(columns / random.uniform(4, 8))
                scan = level + contrast * (0.5 * organ + lesion) + random.normal(0, noise, organ.shape)
                np.save(there / f"{number:03}-scan.npy", scan.astype(np.float32))
                np.save(there / f"{number:03}-mask.npy", lesion.astype(np.uint8))


def scans(root):
    """What `data.name` names: the scans of one hospital or, if `root` has their folders, of several."""
    load = LoadImage(image_only=True, ensure_channel_first=True)  # reads NIfTI and DICOM too

    def part(name):
        files = sorted(Path(root).rglob(f"{name}/*-scan.npy"))
        masks = [load(str(file).replace("-scan", "-mask"))[0] for file in files]
        return {
            "inputs": np.stack([load(file) for file in files]).astype(np.float32),  # [N, 1, H, W]
            "labels": np.stack(masks).astype(np.int64),  # [N, H, W]: 0, or 1 in a lesion
            "groups": [file.parts[-3] for file in files],
        }

    return {"train": part("train"), "test": part("test"), "classes": ["healthy", "lesion"]}


def unet(num_classes, in_channels):
    return UNet(2, in_channels, num_classes, channels=(8, 16, 32), strides=(2, 2), norm="batch")


def dice_loss(outputs, masks):
    """Cross entropy alone would call all pixels healthy, since few are not."""
    return DiceCELoss(to_onehot_y=True, softmax=True)(outputs, masks[:, None])


def densenet():
    return DenseNet121(spatial_dims=2, in_channels=1, out_channels=2)


if __name__ == "__main__":
    write("scans", SCANNERS, seed=0)
    write("new", NEW, seed=1)
