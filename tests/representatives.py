"""One model of every timm module and of every torchvision family, the smallest there is, some made smaller still."""

import gc
import warnings

import pytest
import torch
import torchvision
from torchvision.models import detection, optical_flow, segmentation, video
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from mptify.models import registry
from mptify.models.init_mode import InitMode
from mptify.models.registry import Entry
from mptify.tools.compatibility.families import FAMILIES, IMAGE_SIZES


def _resnet(**options):
    return torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [1, 1, 1, 1], **options)


def _pyramid(**levels):
    """The detectors' backbone, with a short ResNet for ResNet-50."""
    short = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1])
    return detection.backbone_utils._resnet_fpn_extractor(short, 5, **levels)


def _dense_pyramid():
    return _pyramid(returned_layers=[2, 3, 4], extra_blocks=LastLevelP6P7(256, 256))


def _alexnet():
    model = torchvision.models.alexnet(num_classes=10)
    model.classifier[1], model.classifier[4], model.classifier[6] = (
        torch.nn.Linear(*pair) for pair in ((256 * 6 * 6, 64), (64, 64), (64, 10))
    )
    return model


def _vgg():
    model = torchvision.models.vgg11_bn(num_classes=10, init_weights=False)
    model.classifier[0], model.classifier[3] = (
        torch.nn.Linear(512 * 7 * 7, 64),
        torch.nn.Linear(64, 64),
    )
    model.classifier[6] = torch.nn.Linear(64, 10)
    return model


def _clips(conv, conv_first=None, stem=video.resnet.BasicStem):
    """A video ResNet with one block per stage."""
    return video.resnet.VideoResNet(
        video.resnet.BasicBlock, [conv_first or conv, conv, conv, conv], [1, 1, 1, 1], stem
    )


def _fcn():
    return segmentation.fcn._fcn_resnet(
        _resnet(replace_stride_with_dilation=[False, True, True]), 21, None
    )


def _s3d():
    model = video.S3D()
    model.avgpool = torch.nn.AvgPool3d(
        (2, 2, 2)
    )  # as many positions as 64 pixels leave, where 224 leave 7 by 7
    return model


def _box_head(classes):
    """With 64 features for 1,024."""
    heads = detection.faster_rcnn
    return {
        "box_head": heads.TwoMLPHead(256 * 7 * 7, 64),
        "box_predictor": heads.FastRCNNPredictor(64, classes),
    }


def _mask_predictor():
    return detection.mask_rcnn.MaskRCNNPredictor(256, 64, 10)


def _keypoint_head():
    heads = detection.keypoint_rcnn
    return {
        "keypoint_head": heads.KeypointRCNNHeads(256, (64, 64)),
        "keypoint_predictor": heads.KeypointRCNNPredictor(64, 17),
    }


_FEW = {
    "rpn_post_nms_top_n_train": 20,
    "rpn_post_nms_top_n_test": 20,
    "box_batch_size_per_image": 8,
    "box_detections_per_img": 4,
}
_SMALL = {"min_size": 96, "max_size": 192}


def _convnext():
    sizes = (96, 192, 384, 768)
    config = torchvision.models.convnext.CNBlockConfig
    return torchvision.models.ConvNeXt(
        [config(one, two, 1) for one, two in zip(sizes, (*sizes[1:], None), strict=True)]
    )


def _mvit():
    """Three blocks of MViT v1, of which the second halves the image."""
    options = dict.fromkeys(
        ("residual_pool", "residual_with_cls_embed", "rel_pos_embed", "proj_after_attn"), False
    )
    config = video.mvit.MSBlockConfig
    blocks = [
        config(1, 32, 64, [], [3, 3, 3], [], [1, 4, 4]),
        config(2, 64, 64, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2]),
        config(2, 64, 64, [], [3, 3, 3], [], [1, 2, 2]),
    ]
    return video.mvit.MViT(spatial_size=(32, 32), temporal_size=8, block_setting=blocks, **options)


def _ssd():
    """With one layer for each two or three of VGG-16's, and few channels where there are many pixels; it needs 300 of them."""
    vgg = torchvision.models.VGG(
        torchvision.models.vgg.make_layers([16, "M", 32, "M", 64, "M", 512, "M", 512, "M"]),
        init_weights=False,
    )
    backbone = detection.ssd._vgg_extractor(vgg, highres=False, trainable_layers=5)
    anchors = detection.anchor_utils.DefaultBoxGenerator(
        [[2], [2, 3], [2, 3], [2, 3], [2], [2]], steps=[8, 16, 32, 64, 100, 300]
    )
    return detection.ssd.SSD(backbone, anchors, (300, 300), num_classes=10)


def _inception():
    """Whose other classifier needs 299 pixels, if it sees 5×5 of what is left of them."""
    model = torchvision.models.inception_v3(num_classes=10, init_weights=False)
    model.AuxLogits.conv1 = torchvision.models.inception.BasicConv2d(128, 768, kernel_size=1)
    return model


class _ShortRaft(optical_flow.RAFT):
    def forward(self, image1, image2):
        return super().forward(image1, image2, num_flow_updates=2)


def _raft():
    model = optical_flow.raft_small()
    model.__class__ = _ShortRaft
    return model


TORCHVISION = {
    "alexnet": _alexnet,
    "vgg11_bn": _vgg,
    "resnet18": None,
    "resnext50_32x4d": lambda: _resnet(groups=32, width_per_group=4),
    "densenet121": lambda: torchvision.models.DenseNet(32, (1, 1, 1, 1), 64),
    "googlenet": None,
    "inception_v3": _inception,
    "mnasnet0_5": None,
    "mobilenet_v2": None,
    "mobilenet_v3_small": None,
    "efficientnet_b0": None,
    "regnet_y_400mf": None,
    "shufflenet_v2_x0_5": None,
    "squeezenet1_0": None,
    "convnext_tiny": _convnext,
    "swin_t": lambda: torchvision.models.SwinTransformer([4, 4], 96, [2, 2], [3, 6], [7, 7]),
    "swin_v2_t": lambda: torchvision.models.SwinTransformer(
        [4, 4], 96, [2, 2], [3, 6], [8, 8],
        block=torchvision.models.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=torchvision.models.swin_transformer.PatchMergingV2,
    ),
    "vit_b_16": lambda: torchvision.models.VisionTransformer(64, 16, 2, 12, 768, 3072),
    "maxvit_t": lambda: torchvision.models.MaxVit((64, 64), 64, 4, [64, 128], [1, 1], 32, 0.2),
    "deeplabv3_mobilenet_v3_large": None,
    "fcn_resnet50": _fcn,
    "lraspp_mobilenet_v3_large": None,
    "fasterrcnn_mobilenet_v3_large_fpn": lambda: detection.fasterrcnn_mobilenet_v3_large_fpn(weights_backbone=None, **_FEW, **_SMALL),
    "retinanet_resnet50_fpn": lambda: detection.RetinaNet(_dense_pyramid(), 10, **_SMALL),
    "maskrcnn_resnet50_fpn": lambda: detection.MaskRCNN(_pyramid(), **_box_head(10), mask_predictor=_mask_predictor(), **_FEW, **_SMALL),
    "keypointrcnn_resnet50_fpn": lambda: detection.KeypointRCNN(_pyramid(), **_box_head(2), **_keypoint_head(), **_FEW, **_SMALL),
    "fcos_resnet50_fpn": lambda: detection.FCOS(_dense_pyramid(), 10, **_SMALL),
    "ssd300_vgg16": _ssd,
    "ssdlite320_mobilenet_v3_large": None,
    "r3d_18": lambda: _clips(video.resnet.Conv3DSimple),
    "mc3_18": lambda: _clips(video.resnet.Conv3DNoTemporal, video.resnet.Conv3DSimple),
    "r2plus1d_18": lambda: _clips(video.resnet.Conv2Plus1D, stem=video.resnet.R2Plus1dStem),
    "s3d": _s3d,
    "mvit_v1_b": _mvit,
    "swin3d_t": lambda: video.swin_transformer.SwinTransformer3d([2, 4, 4], 96, [2, 2], [3, 6], [8, 7, 7]),
    "raft_small": _raft,
    "quantized_resnet18": None,
    "quantized_mobilenet_v2": None,
    "quantized_mobilenet_v3_large": None,
    "quantized_googlenet": None,
    "quantized_inception_v3": lambda: torchvision.models.quantization.inception_v3(aux_logits=False),  # with them, at 299 pixels only
    "quantized_shufflenet_v2_x0_5": None,
}  # fmt: skip

ENTRIES = [Entry("torchvision", name) for name in TORCHVISION] + [
    Entry("timm", name) for name in FAMILIES
]
# Those that take the tests of a whole network a second or more together: `pytest -m long`.
SLOW = {
    "beit_base_patch16_224", "cait_xxs24_224", "coat_tiny", "convnext_tiny", "cpubone_nano",
    "crossvit_tiny_240", "cs3darknet_focus_s", "csatv2", "davit_tiny",
    "deeplabv3_mobilenet_v3_large", "deepseek_vit_412m", "dla46x_c", "dpn48b",
    "edgenext_xx_small", "efficientformer_l1", "efficientformerv2_s0", "efficientnet_b0",
    "efficientvim_m1", "efficientvit_b0", "efficientvit_m0", "ese_vovnet19b_slim_dw",
    "fasterrcnn_mobilenet_v3_large_fpn", "fastvit_t8", "fcn_resnet50", "fcos_resnet50_fpn",
    "focalnet_tiny_srf", "gcvit_xxtiny", "gemma4_vit_167m", "ghostnet_050", "googlenet",
    "hardcorenas_b", "hgnetv2_b0", "hiera_tiny_224", "hrnet_w18_small", "iformer_t",
    "inception_next_atto", "inception_resnet_v2", "inception_v3", "inception_v4",
    "keypointrcnn_resnet50_fpn", "lambda_resnet26t", "lcnetv2_small", "legacy_seresnet18",
    "legacy_xception", "levit_128s", "lowformer_b0", "lraspp_mobilenet_v3_large",
    "maskrcnn_resnet50_fpn", "maxvit_pico_rw_256", "maxvit_t", "mc3_18", "mnasnet0_5",
    "mobilenet_v2", "mobilenet_v3_small", "mobilenetv3_small_050", "mobilenetv5_base",
    "mobilevit_xxs", "mvit_v1_b", "mvitv2_tiny", "naflexvit_base_patch16_parfac_gap",
    "nasnetalarge", "nest_tiny", "nextvit_small", "pit_ti_224", "pnasnet5large",
    "poolformerv2_s12", "pvt_v2_b0", "quantized_googlenet", "quantized_inception_v3",
    "quantized_mobilenet_v2", "quantized_mobilenet_v3_large", "quantized_resnet18",
    "quantized_shufflenet_v2_x0_5", "qwen3_vit_88m", "r2plus1d_18", "r3d_18", "raft_small",
    "rdnet_tiny", "regnet_y_400mf", "regnetx_002", "repghostnet_050", "repvit_m1", "res2next50",
    "resnest14d", "resnet18", "resnetv2_18", "resnext50_32x4d", "retinanet_resnet50_fpn",
    "rexnet_100", "s3d", "sam2_hiera_tiny", "samvit_base_patch16_224", "selecsls42",
    "sequencer2d_s", "shvit_s1", "skresnet18", "ssd300_vgg16", "ssdlite320_mobilenet_v3_large",
    "swiftformer_xs", "swin3d_t", "swin_tiny_patch4_window7_224", "swinv2_cr_tiny_224",
    "swinv2_tiny_window8_256", "test_nfnet", "tiny_vit_5m_224", "tnt_s_legacy_patch16_224",
    "tresnet_m", "twins_svt_small", "vgg11", "vgg11_bn", "visformer_tiny", "vitamin_small_224",
    "volo_d1_224", "xception41p", "xcit_nano_12_p8_224",
}  # fmt: skip
SOME_QUICK = [
    pytest.param(entry, id=str(entry), marks=[pytest.mark.long] if entry.name in SLOW else [])
    for entry in ENTRIES
]
# Those that take torch six seconds or more to compile and export, which `pytest -m sweep` does.
SLOW_TO_COMPILE = {
    "coat_tiny", "cpubone_nano", "crossvit_tiny_240", "csatv2", "davit_tiny", "deeplabv3_mobilenet_v3_large", "dla46x_c", "dpn48b",
    "edgenext_xx_small", "efficientformer_l1", "efficientformerv2_s0", "efficientnet_b0", "efficientvim_m1", "efficientvit_b0",
    "efficientvit_m0", "ese_vovnet19b_slim_dw", "fasterrcnn_mobilenet_v3_large_fpn", "fastvit_t8", "fcn_resnet50", "fcos_resnet50_fpn",
    "focalnet_tiny_srf", "gcvit_xxtiny", "ghostnet_050", "googlenet", "hardcorenas_b", "hgnetv2_b0", "hiera_tiny_224", "hrnet_w18_small",
    "iformer_t", "inception_next_atto", "inception_resnet_v2", "inception_v3", "inception_v4", "keypointrcnn_resnet50_fpn",
    "lambda_resnet26t", "legacy_xception", "levit_128s", "lowformer_b0", "lraspp_mobilenet_v3_large", "maskrcnn_resnet50_fpn",
    "maxvit_pico_rw_256", "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "mobilenetv3_small_050", "mobilenetv5_base",
    "mobilevit_xxs", "mvit_v1_b", "mvitv2_tiny", "nasnetalarge", "nest_tiny", "nextvit_small", "pit_ti_224", "pnasnet5large", "pvt_v2_b0",
    "quantized_googlenet", "quantized_inception_v3", "quantized_mobilenet_v2", "quantized_mobilenet_v3_large",
    "quantized_shufflenet_v2_x0_5", "r2plus1d_18", "raft_small", "rdnet_tiny", "regnet_y_400mf", "repghostnet_050", "repvit_m1",
    "res2next50", "resnest14d", "retinanet_resnet50_fpn", "rexnet_100", "s3d", "sam2_hiera_tiny", "selecsls42", "sequencer2d_s",
    "shufflenet_v2_x0_5", "shvit_s1", "skresnet18", "squeezenet1_0", "ssd300_vgg16", "ssdlite320_mobilenet_v3_large", "starnet_s050",
    "swiftformer_xs", "swin_tiny_patch4_window7_224", "swinv2_cr_tiny_224", "swinv2_tiny_window8_256", "test_mambaout", "test_nfnet",
    "tiny_vit_5m_224", "tnt_s_legacy_patch16_224", "tresnet_m", "twins_svt_small", "volo_d1_224", "xception41p", "xcit_nano_12_p8_224",
}  # fmt: skip


def _clip(*shape):
    """The same whatever was imported before: of some, a layer of few positions gets no gradient."""
    return (torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(2)),)


_CLIP = _clip(8, 32, 32)
_INPUTS = {
    "mvit_v1_b": _CLIP,
    "r3d_18": _CLIP,
    "mc3_18": _CLIP,
    "r2plus1d_18": _CLIP,
    "s3d": _clip(16, 64, 64),
}
_SIZES = {  # where 64 pixels, or a detector's 96, are too few; None: only at the size that it was made for
    ("torchvision", "inception_v3"): 128,
    ("torchvision", "quantized_inception_v3"): 96,
    **{("timm", name): size for name, size in IMAGE_SIZES.items()},
}
_WHOLE = {  # networks that need each of their blocks
    "cait_xxs24_224", "coat_tiny", "ese_vovnet19b_slim_dw", "hrnet_w18_small", "mvitv2_tiny", "r2plus1d_18", "sequencer2d_s",
    "ssdlite320_mobilenet_v3_large", "tnt_s_legacy_patch16_224", "xception41p",
}  # fmt: skip


def build(entry, device="cpu"):
    """The network and inputs for it, small ones; of `meta`, the network as it comes."""
    gc.collect()  # the last test's networks hang in cycles with their graphs
    gc.freeze()  # what is left is there to stay, and need not be looked through again
    if device == "meta":
        return _build(entry, None, "cpu" if _needs_a_device(entry) else device)
    torch.manual_seed(0)
    detector = (
        entry.source == "torchvision" and registry.torchvision_kind(entry.name) == "detection"
    )
    size = _SIZES.get((entry.source, entry.name), 96 if detector else 64)
    model = _build(entry, size, device)
    if entry.name not in _WHOLE:
        _thin_(model, -1 if entry.name == "pnasnet5large" else 0)
    return model, _INPUTS[entry.name] if entry.name in _INPUTS else registry.example_inputs(
        entry, model, size
    )


class Passed(torch.nn.Module):
    """In place of a block: hands on one of its inputs."""

    def __init__(self, which):
        super().__init__()
        self.which = which

    def forward(self, *inputs, **_):
        return inputs[self.which]


def _thin_(model, which):
    """Of blocks that follow each other and are alike, type and shapes, keep the first."""
    for part in model.modules():
        last = None
        for name, child in list(part._modules.items()):
            shapes = (
                type(child),
                [(key, value.shape) for key, value in child.state_dict().items()],
            )
            if shapes == last and shapes[1]:
                if isinstance(part, torch.nn.Sequential):
                    del part._modules[name]
                elif (
                    sum(len(shape) > 1 for _, shape in shapes[1]) > 1
                ):  # a block, not one of several like layers
                    part._modules[name] = Passed(which)
            last = shapes


def _needs_a_device(entry):
    return entry.source == "torchvision" and (
        entry.name.startswith("regnet") or registry.torchvision_kind(entry.name) == "detection"
    )


def _build(entry, size, device):
    options = FAMILIES[entry.name] if entry.source == "timm" else {}
    with warnings.catch_warnings(), torch.device(device), InitMode("constant"):
        warnings.simplefilter("ignore")
        small = TORCHVISION.get(entry.name) if entry.source == "torchvision" else None
        if small is not None:
            return small()
        if not options:
            return registry.build(
                entry, num_classes=None if device == "meta" else 10, input_size=size
            )
        import timm

        sized = {"img_size": size} if size else {}
        try:
            return timm.create_model(entry.name, num_classes=10, **options, **sized)
        except TypeError:
            return timm.create_model(entry.name, num_classes=10, **options)
