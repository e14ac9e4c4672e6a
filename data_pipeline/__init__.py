"""From text to masked batches: corpus, tokenizer, shards, lanes, masking, loader."""
