"""Replay of recorded agent traffic: read traces, render prompts, plan or serve them under several policies, report."""
