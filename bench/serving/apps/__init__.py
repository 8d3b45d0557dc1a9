"""The peers, each in the ordinary way of its own; bodies are raw int64, answers raw float32."""
