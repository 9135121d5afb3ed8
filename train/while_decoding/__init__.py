"""Training of a head while an engine decodes with it."""

from train.while_decoding.batches import batch_of
from train.while_decoding.learner import Learner, LearnerOptions
from train.while_decoding.policy import policy_loss

__all__ = ["Learner", "LearnerOptions", "batch_of", "policy_loss"]
