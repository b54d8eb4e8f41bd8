"""One model of every timm module and of every torchvision family, the smallest there is, some made smaller still."""

import warnings

import torch

from mptify import catalog
from mptify.catalog import Entry

TIMM = {
    "beit_base_patch16_224": {"depth": 2},
    "halonet_h1": {},
    "test_byobnet": {},
    "cait_xxs24_224": {},
    "coat_tiny": {},
    "convit_tiny": {},
    "convmixer_768_32": {},
    "test_convnext": {},
    "cpubone_nano": {},
    "crossvit_tiny_240": {},
    "csatv2": {},
    "cs3darknet_focus_s": {},
    "davit_tiny": {},
    "deepseek_vit_412m": {"depth": 2},
    "deit_tiny_patch16_224": {},
    "densenet121": {},
    "dla46x_c": {},
    "dpn48b": {},
    "edgenext_xx_small": {},
    "efficientformer_l1": {},
    "efficientformerv2_s0": {},
    "test_efficientnet": {},
    "efficientvim_m1": {},
    "efficientvit_b0": {},
    "efficientvit_m0": {},
    "vit_tiny_patch16_dinov3_qkvb": {},
    "fasternet_t0": {},
    "fastvit_t8": {},
    "focalnet_tiny_srf": {},
    "gcvit_xxtiny": {},
    "gemma4_vit_167m": {"depth": 2},
    "ghostnet_050": {},
    "hardcorenas_b": {},
    "hgnetv2_b0": {},
    "hiera_tiny_224": {},
    "sam2_hiera_tiny": {},
    "hrnet_w18_small": {},
    "iformer_t": {},
    "inception_next_atto": {},
    "inception_resnet_v2": {},
    "inception_v3": {},
    "inception_v4": {},
    "lcnetv2_small": {},
    "levit_128s": {},
    "lowformer_b0": {},
    "test_mambaout": {},
    "maxvit_pico_rw_256": {},
    "poolformerv2_s12": {},
    "gmlp_ti16_224": {},
    "mobilenetv3_small_050": {},
    "mobilenetv5_base": {"channel_multiplier": 0.25},
    "mobilevit_xxs": {},
    "mvitv2_tiny": {},
    "naflexvit_base_patch16_parfac_gap": {"depth": 2},
    "nasnetalarge": {},
    "nest_tiny": {},
    "nextvit_small": {},
    "test_nfnet": {},
    "pit_ti_224": {},
    "pnasnet5large": {},
    "pvt_v2_b0": {},
    "qwen3_vit_88m": {"depth": 2},
    "rdnet_tiny": {},
    "regnetx_002": {},
    "repghostnet_050": {},
    "repvit_m1": {},
    "res2next50": {},
    "resnest14d": {},
    "test_resnet": {},
    "resnetv2_18": {},
    "rexnet_100": {},
    "selecsls42": {},
    "legacy_seresnet18": {},
    "sequencer2d_s": {},
    "shvit_s1": {},
    "skresnet18": {},
    "starnet_s050": {},
    "swiftformer_xs": {},
    "swin_tiny_patch4_window7_224": {},
    "swinv2_tiny_window8_256": {},
    "swinv2_cr_tiny_224": {},
    "tiny_vit_5m_224": {},
    "tnt_s_legacy_patch16_224": {},
    "tresnet_m": {"width_factor": 0.25},
    "twins_svt_small": {},
    "vgg11": {},
    "visformer_tiny": {},
    "test_vit": {},
    "vit_tiny_r_s16_p8_224": {},
    "vit_srelpos_small_patch16_224": {},
    "samvit_base_patch16_224": {"depth": 2},
    "vitamin_small_224": {},
    "volo_d1_224": {},
    "ese_vovnet19b_slim_dw": {},
    "legacy_xception": {},
    "xception41p": {},
    "xcit_nano_12_p8_224": {},
}

TORCHVISION = [
    "alexnet", "vgg11_bn", "resnet18", "resnext50_32x4d", "densenet121", "googlenet", "inception_v3", "mnasnet0_5", "mobilenet_v2",
    "mobilenet_v3_small", "efficientnet_b0", "regnet_y_400mf", "shufflenet_v2_x0_5", "squeezenet1_0", "convnext_tiny", "swin_t",
    "swin_v2_t", "vit_b_16", "maxvit_t", "deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large",
    "fasterrcnn_mobilenet_v3_large_fpn", "retinanet_resnet50_fpn", "maskrcnn_resnet50_fpn", "keypointrcnn_resnet50_fpn",
    "fcos_resnet50_fpn", "ssd300_vgg16", "ssdlite320_mobilenet_v3_large", "r3d_18", "mc3_18", "r2plus1d_18", "s3d", "mvit_v1_b",
    "swin3d_t", "raft_small", "quantized_resnet18", "quantized_mobilenet_v2", "quantized_mobilenet_v3_large", "quantized_googlenet",
    "quantized_inception_v3", "quantized_shufflenet_v2_x0_5",
]  # fmt: skip

ENTRIES = [Entry("torchvision", name) for name in TORCHVISION] + [Entry("timm", name) for name in TIMM]
TOO_LARGE = {
    "vgg11",
    "vgg11_bn",
    "nasnetalarge",
    "pnasnet5large",
    "keypointrcnn_resnet50_fpn",
    "mvit_v1_b",
}  # `mptify zoo` runs them
_SIZES = (64, 96, 112, 128, None)
_AT_LEAST = {"efficientvim_m1": 128, "efficientvit_m0": 128}  # below, their last attention has one token and no gradient


def build(entry, device="cpu"):
    """The network and inputs for it, at the smallest size that it takes."""
    options = TIMM.get(entry.name, {}) if entry.source == "timm" else {}
    if device == "meta":
        return _build(entry, None, options, "cpu" if _needs_a_device(entry) else device)
    least = 96 if entry.source == "torchvision" and catalog.torchvision_kind(entry.name) == "detection" else _AT_LEAST.get(entry.name, 0)
    for size in [size for size in _SIZES if size is None or size >= least]:
        try:
            model = _build(entry, size, options, device)
            inputs = catalog.example_inputs(entry, model, size)
            with torch.no_grad():
                model.train()(*inputs)
            return model, inputs
        except Exception:
            if size is None:
                raise
    return None


def _needs_a_device(entry):
    return entry.source == "torchvision" and (entry.name.startswith("regnet") or catalog.torchvision_kind(entry.name) == "detection")


def _build(entry, size, options, device):
    with warnings.catch_warnings(), torch.device(device), catalog.quick_init():
        warnings.simplefilter("ignore")
        if not options:
            return catalog.build(entry, input_size=size)
        import timm

        sized = {"img_size": size} if size else {}
        try:
            return timm.create_model(entry.name, **options, **sized)
        except TypeError:
            return timm.create_model(entry.name, **options)
