"""Only its presence tells: releases without this file have no Whisper."""
