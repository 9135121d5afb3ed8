"""Trained drafters: their format, those that come with specjax, and drafters made of them."""
