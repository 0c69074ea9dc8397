"""Answers that the model writes to prompts as it trains.

sampling   a prompt → a group of answers, each token with its log-probability
rewards    what a user's functions say of an answer; advantages within a group
windows    groups → the windows that a step trains on
"""
