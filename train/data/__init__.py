"""Data on disk, as TFDS datasets of array_record files; TensorFlow is not needed."""
