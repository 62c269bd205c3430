"""Systems x clips -> numbers: accuracy (CER, WER), latency and throughput."""
