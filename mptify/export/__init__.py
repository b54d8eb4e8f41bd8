"""Files for other runtimes: ONNX, dense state dicts, packed programs."""
