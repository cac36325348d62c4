"""Entries in few bits: KIVI's codec and cache, SpeCache's fetched entries."""
