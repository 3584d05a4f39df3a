"""Tests of compiled passes."""
