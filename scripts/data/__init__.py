"""Corpora, datasets and goldens that come with specjax."""
