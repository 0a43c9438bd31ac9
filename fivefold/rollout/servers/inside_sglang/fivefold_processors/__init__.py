"""What SGLang takes in the place of its own processors of images (`SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE`)."""
