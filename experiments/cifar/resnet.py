"""A ResNet for images of 32 x 32 pixels, of paddle.vision's blocks.

As everybody does for such images, the first convolution is 3 x 3, without a stride and without
pooling behind it. The names are those of paddle.vision.models.resnet18, whose weights for ImageNet
fit but for the first and the last layer: --init_model_path FILE --init_partial.
"""

import paddle
from paddle.nn import AdaptiveAvgPool2D, BatchNorm2D, Conv2D, Linear, Sequential
from paddle.vision.models.resnet import BasicBlock

# Of CIFAR-10's training images, by channel: of 255.
MEAN, SD = [125.3, 123.0, 113.9], [63.0, 62.1, 66.7]


class ResNet(paddle.nn.Layer):
    """Width 64 and blocks [2, 2, 2, 2] are a ResNet-18 (He et al. 2015, arXiv:1512.03385).

    Args:
        width: Channels of the first stage; each other one has twice those of the one before it.
        blocks: How many blocks each stage has.
    """

    def __init__(self, width, blocks, num_classes=10):
        super().__init__()
        for name, values in ("mean", MEAN), ("sd", SD):
            values = paddle.to_tensor(values).reshape([3, 1, 1])
            self.register_buffer(name, values, persistable=False)
        self.conv1 = Conv2D(3, width, 3, padding=1, bias_attr=False)
        self.bn1 = BatchNorm2D(width)
        channels = width
        self.stages = [f"layer{stage + 1}" for stage in range(len(blocks))]
        for stage, num_blocks in enumerate(blocks):
            layers = []
            for block in range(num_blocks):
                stride = 2 if stage and not block else 1
                layers.append(basic_block(channels, width * 2**stage, stride))
                channels = width * 2**stage
            self.add_sublayer(self.stages[stage], Sequential(*layers))
        self.avgpool = AdaptiveAvgPool2D(1)
        self.fc = Linear(channels, num_classes)

    def forward(self, images):
        """Logits [N, classes] for images [N, 3, 32, 32] of numbers from 0 to 255."""
        x = (images.astype("float32") - self.mean) / self.sd
        x = paddle.nn.functional.relu(self.bn1(self.conv1(x)))
        for stage in self.stages:
            x = getattr(self, stage)(x)
        return self.fc(self.avgpool(x).flatten(1))


def basic_block(channels, out_channels, stride):
    shortcut = None  # the identity
    if stride > 1 or channels != out_channels:
        convolution = Conv2D(channels, out_channels, 1, stride=stride, bias_attr=False)
        shortcut = Sequential(convolution, BatchNorm2D(out_channels))
    return BasicBlock(channels, out_channels, stride, shortcut)
