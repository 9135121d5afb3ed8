"""Datasets on disk, as TFDS datasets in array_record files; TensorFlow is not needed."""
