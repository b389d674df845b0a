"""DeepSeek-V4 as functions of (model, values): cached and cache-free, and reading and writing checkpoints."""
