"""ONNX Runtime: export, session and the plan of a call. Begin with strategy."""

from .strategy import OnnxRuntime as OnnxRuntime
