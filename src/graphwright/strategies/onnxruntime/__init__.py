"""ONNX Runtime: export, session, and how the exported model is called. Begin with strategy."""

from .strategy import OnnxRuntime as OnnxRuntime
