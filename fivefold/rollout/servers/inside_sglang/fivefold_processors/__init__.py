"""What SGLang takes in place of the processors of images that come with it (`SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE`)."""
