"""The ops in existing models: of torch, of the Annotated Transformer, of Hugging Face."""
