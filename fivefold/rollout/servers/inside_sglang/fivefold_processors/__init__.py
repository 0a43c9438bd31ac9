"""What takes the place of SGLang's processors of images (`SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE`)."""
