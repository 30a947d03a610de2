"""What predicts the masked tokens: one decoder a file."""

KINDS = {"self": "self_attention.SelfAttention", "cross": "cross_attention.CrossAttention", "linear": "linear.Linear"}
