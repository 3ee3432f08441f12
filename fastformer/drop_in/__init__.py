"""Run the ops in existing models: torch, the Annotated Transformer, Hugging Face."""
