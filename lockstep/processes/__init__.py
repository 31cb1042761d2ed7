"""Processes that answer calls: start one, send to it, get its answer before a deadline, on this machine or on Ray.

Must not know what is asked of them.
"""
