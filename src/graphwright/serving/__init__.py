"""serve(): models behind the Open Inference Protocol, their requests joined into batches."""
