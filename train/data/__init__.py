"""Datasets on disk, as TFDS datasets of array_record files, without TensorFlow."""
