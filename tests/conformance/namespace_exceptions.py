"""What of torch's namespace is not called on dtorch tensors, and why. docs/namespace.md shows this table."""

from __future__ import annotations

__all__ = ["EXCEPTIONS", "Exceptions", "document"]

# Reason -> space -> names.
Exceptions = dict[str, dict[str, str]]

EXCEPTIONS: Exceptions = {
    "Quantized tensors hold scales beside their values: they cannot be distributed. Quantize `t.to_torch()`.": {
        "torch": "choose_qparams_optimized dequantize empty_quantized fbgemm_linear_fp16_weight "
        "fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation "
        "fbgemm_linear_quantize_weight fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix "
        "fused_moving_avg_obs_fake_quant int_repr q_per_channel_axis q_per_channel_scales q_per_channel_zero_points "
        "q_scale q_zero_point quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic "
        "quantized_batch_norm quantized_gru quantized_gru_cell quantized_lstm quantized_lstm_cell "
        "quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d quantized_rnn_relu_cell "
        "quantized_rnn_tanh_cell",
        "Tensor": "dequantize int_repr q_per_channel_axis q_per_channel_scales q_per_channel_zero_points q_scale "
        "q_zero_point qscheme",
    },
    "Sparse and nested layouts: a dtorch tensor is strided. Write it with dense tensors, or with `t.to_torch()`.": {
        "torch": "ccol_indices_copy col_indices_copy crow_indices_copy dsmm hsmm hspmm indices_copy resize_as_sparse_ "
        "row_indices_copy saddmm smm sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor "
        "sparse_csc_tensor sparse_csr_tensor spmm sspaddmm values_copy",
        "Tensor": "ccol_indices coalesce col_indices crow_indices dense_dim indices is_coalesced resize_as_sparse_ "
        "row_indices smm sparse_dim sparse_mask sparse_resize_ sparse_resize_and_clear_ sspaddmm to_padded_tensor "
        "to_sparse to_sparse_bsc to_sparse_bsr to_sparse_coo to_sparse_csc to_sparse_csr values",
    },
    "Memory: a dtorch tensor's lies on its executors, so there is no pointer and no storage to hand out, and no Python "
    "function to run on each element. Write `t.to_torch()`, whose memory is this process's.": {
        "torch": "to_dlpack",
        "Tensor": "apply_ const_data_ptr data_ptr map2_ map_ record_stream resize_ share_memory_ storage "
        "storage_type untyped_storage",
    },
    "Other devices: a device is named by a mesh, `t.to(mesh)`; `t.cuda()` gathers to one GPU.": {
        "torch": "get_device_module",
        "Tensor": "cuda ipu mtia xpu",
    },
    "Kernels of one library (cuDNN, MIOpen, oneDNN) or of one step of SyncBatchNorm: the functions that torch "
    "documents (`conv2d`, `batch_norm`, …) choose among them on the executors.": {
        "torch": "batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats "
        "batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats cudnn_affine_grid_generator "
        "cudnn_batch_norm cudnn_convolution cudnn_convolution_add_relu cudnn_convolution_relu "
        "cudnn_convolution_transpose cudnn_grid_sampler miopen_batch_norm miopen_convolution "
        "miopen_convolution_add_relu miopen_convolution_relu miopen_convolution_transpose miopen_ctc_loss "
        "miopen_depthwise_convolution miopen_rnn mkldnn_adaptive_avg_pool2d mkldnn_convolution "
        "mkldnn_linear_backward_weights mkldnn_max_pool2d mkldnn_max_pool3d mkldnn_rnn_layer native_norm",
        "Tensor": "to_mkldnn",
        "nn.functional": "scaled_grouped_mm scaled_mm",
    },
    "Compilers and their tools (TorchScript, torch.compile, export): they trace this process, where no kernel runs, so "
    "there is nothing to gain; dtorch plans each call. A function of dtorch tensors under `torch.compile` runs as it "
    "stands ([above](#torchcompile)); export refuses.": {
        "torch": "compile fork import_ir_module import_ir_module_from_buffer merge_type_from_type_comment parse_ir "
        "parse_schema parse_type_comment slice_inverse sym_fresh_size unify_type_list wait",
        "Tensor": "slice_inverse",
        "nn.functional": "assert_int_or_pair boolean_dispatch handle_torch_function has_torch_function "
        "has_torch_function_unary has_torch_function_variadic",
    },
    "Settings of this process that another device or another thread pool has, or that can be set once only; torch's "
    "own are used as they are.": {
        "torch": "classproperty get_autocast_gpu_dtype get_autocast_ipu_dtype get_autocast_xla_dtype init_num_threads "
        "is_autocast_ipu_enabled is_autocast_xla_enabled prepare_multiprocessing_environment "
        "profiler_allow_cudagraph_cupti_lazy_reinit_cuda12 set_autocast_gpu_dtype set_autocast_ipu_dtype "
        "set_autocast_ipu_enabled set_autocast_xla_dtype set_autocast_xla_enabled set_default_device "
        "set_default_tensor_type set_num_interop_threads thread_safe_generator",
    },
    "Removed from torch: each raises, and names its successor.": {
        "torch": "eig lstsq matrix_rank solve symeig",
        "Tensor": "eig lstsq reinforce solve symeig",
    },
    "Named dims: this torch does not build them.": {
        "Tensor": "index",
    },
}


def document() -> str:
    """The table as docs/namespace.md shows it."""
    lines = []
    for reason, spaces in EXCEPTIONS.items():
        lines.append(f"* {reason}\n")
        for space, names in spaces.items():
            listed = ", ".join(f"`{n}`" for n in names.split())
            lines.append(f"  * `{space}`: {listed}")
        lines.append("")
    return "\n".join(lines)
