"""The tests of `pytest -m quick`: some of every package, under 20 s once kernels are compiled.

File under tests/ -> regular expressions, each of which is the whole name of some of its tests,
parameters included. conftest.py marks them, and tests/test_quick.py holds this list to the tests.
"""

QUICK = {
    "alloc/test_lifetime.py": (r".*",),
    "alloc/test_plan.py": ("test_nothing_alive_overlaps", "test_sharing_memory_changes_no_number"),
    "attention/test_decode.py": (r"test_as_the_plain_loop_has_it\[.*",),
    "attention/test_flash.py": ("test_tiles_give_what_the_plain_path_gives",),
    "backward/test_walk.py": (r".*",),
    "chat/test_answers.py": (r"test_(learned|all|what|a|an|the|names|bos)_.*",),
    "cli/test_finetune.py": ("test_it_says_what_it_will_do_then_does_it",),
    "cli/test_start.py": (
        r"test_every_command_in_the_table_has_help\[.*",
        "test_every_setting_has_one_option_with_its_help_and_default",
        "test_an_error_is_one_line_whatever_it_holds",
    ),
    "gemm/test_int8.py": (r"test_how_far_from_exact\[.*",),
    "gemm/test_product.py": (r"test_a_packed_weight_multiplies_as_its_float32_self\[.*",),
    "gguf/test_gguf_reader.py": (r"test_(getters|strings|data|views)_.*",),
    "gguf/test_gguf_writer.py": ("test_the_gguf_package_reads_what_we_write",),
    "graph/test_graph.py": (r".*",),
    "graph/test_tensor.py": (r".*",),
    "lora/test_attach.py": (r".*",),
    "lora/test_chats.py": (r"test_(?!packed).*",),
    "lora/test_train.py": (
        "test_the_loss_falls_and_the_reports_are_in_order",
        "test_a_run_takes_adamw_s_steps_at_the_schedule_s_rates",
    ),
    "models/test_golden.py": (
        r"test_logits\[llama-Q8_0\]",
        r"test_logits_with_an_adapter\[qwen3\]",
        r"test_gradients_of_an_adapter\[qwen3-True\]",
    ),
    "models/test_cache.py": (r"test_every_architecture_remembers\[(llama|qwen3|mamba)\]",),
    "models/test_generation.py": ("test_greedy_text_is_what_the_model_says_of_its_own_text",),
    "ops/test_fused.py": (r".*",),
    "quants/test_unpack.py": (r"test_equals_reference\[.*",),
    "quants/test_pack.py": (r"test_round_trip_error\[.*",),
    "runtime/test_pages.py": (r".*",),
    "schedule/test_lora_step.py": (r".*\[qwen3-F16-half\]",),
    "schedule/test_schedule.py": (r"test_the_.*", r"test_a_(part|copy|writer)_.*"),
    "test_architecture.py": (
        r"test_imports_point_one_way\[.*",
        r"test_kernels_take_nothing_that_the_cache_does_not_watch\[.*",
        r"test_functions_stay_short\[.*",
        r"test_(every_part|no_module|the_watched|the_check)_.*",
    ),
    "test_every_op.py": (
        r"test_the_declaration_is_complete\[.*",
        r"test_(every_setting_says|a_wrong_setting_is|what_does_not_fit_is)_.*",
        r"test_the_kernel_agrees_with_the_reference\[\w+-0\]",
        r"test_the_gradient_is_the_slope_of_the_reference\[\w+-0\]",
    ),
    "test_op_edges.py": (r"test_misfits_are_refused_when_the_graph_is_built\[.*",),
    "test_map.py": (r".*",),
    "test_quick.py": (r".*",),
    "test_sizes.py": (r".*",),
    "test_start.py": (r"test_names_arrive_when_asked_for\[.*",),
    "test_threads.py": (r".*",),
    "tokenizer/test_tokenizer_ids.py": (r"test_every_kind_gives_llama_cpps_ids\[.*",),
}
